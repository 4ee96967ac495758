"""Loggers that know about ranks: what a rank logs, and how its lines reach rank 0."""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from lightning_lockstep import _settings
from lightning_lockstep._lightning import rank_zero_only
from lightning_lockstep._settings import LEVELS
from lightning_lockstep.distributed import SideChannel
from lightning_lockstep.distributed.failure.process_exit import exit_plan, on_flush
from lightning_lockstep.distributed.process_group import RankGroup, current_group
from lightning_lockstep.distributed.side_channel.opening import side_channel_if_open
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.logs.collector import LINE, Collector, Line, LogCall, record_of, with_real_path

_host = socket.gethostname()

# Handlers of this rank's own files: they get a line on the rank that logs it, not on rank 0, which prints it.
local_handlers: list[logging.Handler] = []


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Return a logger whose lines are printed by the main rank, by every rank, or by all ranks in rank order.

    Args:
        name: Name of the logger, usually ``__name__``.
        log_level: Its level; by default ``LOCKSTEP_LOG_LEVEL``, and if that is not set the level is left
            as it is. Only this logger's level is set, never the root logger's.

    Returns:
        An adapter with the methods of :class:`logging.Logger`; see :class:`RankLogger`.

    Raises:
        ConfigurationError: There is no such level.

    Ranks: any rank, at any time, with or without a distributed run; nothing is sent.
    """
    level = _settings.log_level() if log_level is None else log_level
    logger = logging.getLogger(name)
    try:
        if level is not None:
            logger.setLevel(level.upper() if isinstance(level, str) else level)
    except (TypeError, ValueError) as error:
        expected = f"expected one of {', '.join(LEVELS)}, or a number"
        raise ConfigurationError(f"log_level={level!r}: {expected}.") from error
    return RankLogger(logger)


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """An adapter over a standard logger, with two more keywords on every method.

    ``main_process_only=True`` (the default) prints on the main rank only, ``main_process_only=False`` on every rank
    that makes the call. ``in_order=True`` prints the lines of all ranks in rank order, through rank 0: the call posts
    one message and returns, and a line that other ranks do not log is printed after ``order_timeout`` with their
    numbers. ``extra``, ``exc_info``, ``stack_info``, ``stacklevel`` and ``%`` arguments work as in :mod:`logging`.
    """

    logger: logging.Logger

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log ``msg % args`` at ``level``; all other methods come here. See the class for the keywords."""
        logger = self.logger
        if not logger.isEnabledFor(level):
            return
        # The common case is handled here without a record, because the caller's time is counted in microseconds.
        if len(kwargs) == 1 and kwargs.get("in_order") and not local_handlers and not logger.filters:
            sender = _find_sender()
            if sender is not None:
                frame = _caller(1)
                code, text, now = frame.f_code, format_message(msg, args), time.time()
                place = logger.name, level, code.co_filename, frame.f_lineno
                sender.send((*place, text, now, code.co_name, "", {}))
                return
        self._log_record(level, msg, args, kwargs)

    def _log_record(self, level: int, msg: object, args: Any, kwargs: dict[str, Any]) -> None:
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        # Before there is a process group, environment variables tell the rank.
        rank, world_size = int(getattr(rank_zero_only, "rank", 0) or 0), 1
        if (group := current_group()) is not None:
            rank, world_size = group.rank, group.world_size
        plain = (main_process_only and not in_order) or (world_size == 1 and rank == 0)
        if plain and rank != 0:
            return
        record = self._record(level, msg, args, kwargs)
        if in_order and not plain:
            passed = self.logger.filter(record)
            if not passed:
                return
            record = passed if isinstance(passed, logging.LogRecord) else record
            for handler in local_handlers:
                if record.levelno >= handler.level:
                    handler.handle(record)
            if _send(call_of(record)):
                return
            record.lockstep_collected = True  # this rank's files have it already
        if not plain:
            record.lockstep_prefix = prefix = f"[rank {rank}] "
            record.msg = prefix + str(record.msg)
            record.lockstep_ranks, record.lockstep_hosts = (rank,), (_host,)
        self.logger.handle(record)

    def _record(self, level: int, msg: object, args: Any, kwargs: dict[str, Any]) -> logging.LogRecord:
        exc_info = kwargs.pop("exc_info", None)
        if isinstance(exc_info, BaseException):
            exc_info = (type(exc_info), exc_info, exc_info.__traceback__)
        elif exc_info and not isinstance(exc_info, tuple):
            exc_info = sys.exc_info()
        frame = _caller(kwargs.pop("stacklevel", 1))
        stack = None
        if kwargs.pop("stack_info", False):
            stack = "Stack (most recent call last):\n" + "".join(traceback.format_stack(frame)).rstrip()
        extra = kwargs.pop("extra", None)
        if kwargs:
            raise TypeError(f"a logging call got keywords that it does not know: {', '.join(sorted(kwargs))}")
        name, path, function = self.logger.name, frame.f_code.co_filename, frame.f_code.co_name
        return self.logger.makeRecord(name, level, path, frame.f_lineno, msg, args, exc_info, function, extra, stack)


def _caller(stacklevel: int) -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        stacklevel -= frame.f_code.co_filename not in _SKIPPED_FILES
        if stacklevel <= 0:
            break
        frame = frame.f_back
    return frame


_SKIPPED_FILES = (logging.info.__code__.co_filename, _caller.__code__.co_filename)


# -- A log record as data --

# Attributes that every LogRecord has; all others come from `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def format_message(msg: object, args: Any) -> str:
    """Return the text as :meth:`logging.LogRecord.getMessage` does, and a text too if the arguments do not fit."""
    try:
        text = str(msg)
        if args:
            one_mapping = len(args) == 1 and isinstance(args[0], Mapping) and args[0]
            text = text % (args[0] if one_mapping else args)
    except Exception as error:  # as in `logging`, a faulty call must not end the program
        return f"{msg!r} with {args!r}, which cannot be filled in: {type(error).__name__}: {error}"
    return text


def call_of(record: logging.LogRecord) -> LogCall:
    """Return the call that made a log record of this rank, with its arguments filled in."""
    trace = ""
    if record.exc_info:
        trace = logging.Formatter().formatException(record.exc_info)
    if record.stack_info:
        trace = f"{trace}\n{record.stack_info}".strip()
    text, function = format_message(record.msg, record.args), record.funcName or ""
    place = record.name, record.levelno, record.pathname, record.lineno
    return *place, text, record.created, function, trace, _as_json(extra_of(record))


def extra_of(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD and not k.startswith("lockstep_")}


def _as_json(extra: dict[str, Any]) -> dict[str, Any]:
    if not extra:  # as nearly always
        return extra
    try:
        copy: dict[str, Any] = json.loads(json.dumps(extra, default=str))
    except (TypeError, ValueError):  # keys that JSON cannot hold, a list that holds itself
        copy = {name: str(value) for name, value in extra.items()}
    return copy


# -- From a rank to the collector on rank 0 --

# How long a rank keeps a line, to print it itself if rank 0 fails: as long as a line waits on rank 0, and a margin [s].
_KEPT_FOR = 7.0


class LineSender:
    """Sends this rank's lines to rank 0, and keeps the latest in case rank 0 fails."""

    def __init__(self, channel: SideChannel) -> None:
        self.channel = channel
        self.collector = Collector(channel) if channel.rank == 0 else None
        self.process = os.getpid()
        self._kept: deque[LogCall] = deque(maxlen=1_000)
        if self.collector is None:
            # A closed channel has delivered its lines; then the hook for a forced end would only keep this alive.
            channel.at_close(on_flush(self.flush))

    def send(self, call: LogCall, topic: str = LINE) -> None:
        """Send a line and return at once; other threads do all that can wait."""
        if self.collector is not None:
            self.collector.take(topic, 0, call)
            return
        self._kept.append(call)
        self.channel.post(topic, with_real_path(call), to=0)

    def flush(self) -> None:
        """Send the queued lines; if rank 0 has failed, print here those that it may not have printed."""
        if self.channel.usable:
            self.channel.flush(1.0)
        oldest, why = time.time() - _KEPT_FOR, "printed here because rank 0 has failed"
        while self._kept and self.channel.lost:
            call = self._kept.popleft()
            if call[5] >= oldest:
                _print_here(call, self.channel.rank, f"[rank {self.channel.rank}, {why}] ")


def _send(call: LogCall) -> bool:
    """Send a line now, or once rank 0 has opened the channel; return whether either is possible."""
    global _waiter
    sender = _find_sender()
    if sender is not None:
        sender.send(call)
        return True
    group = current_group()
    if group is None or group.world_size == 1 or side_channel_if_open() is not None:
        return False
    _kept_back.append(call)
    if _waiter is None or not _waiter.is_alive():
        _waiter = threading.Thread(target=_look_for_channel, name="lockstep-log-open", daemon=True)
        with suppress(RuntimeError):  # raised if Python is exiting; lines kept back are printed at the end
            _waiter.start()
    return True


def _find_sender() -> LineSender | None:
    """Return what sends this rank's lines, or ``None`` while the ranks are not connected."""
    global _cached
    group = current_group()
    if group is None:
        return None
    if _cached[0] is not group:
        # Only rank 0 can open the channel without asking the store.
        channel = side_channel_if_open(open_if_easy=group.rank == 0)
        if channel is None:
            return None
        _cached = group, channel.get_or_create(LineSender)
    sender = _cached[1]
    # A forked process has this object but not its threads.
    if sender is None or not sender.channel.usable or sender.process != os.getpid():
        return None
    if _kept_back:
        # Whichever thread sends them, they go in their order and before the next line of this thread.
        with _releasing:
            while _kept_back:
                sender.send(_kept_back.popleft())
    return sender


def _look_for_channel() -> None:
    while current_group() is not None and side_channel_if_open(open_if_easy=True) is None:
        time.sleep(0.05)
    _find_sender()


def _print_kept_back() -> None:
    _find_sender()
    group = current_group()
    while _kept_back:
        _print_here(_kept_back.popleft(), 0 if group is None else group.rank)


def _print_here(call: LogCall, rank: int, prefix: str | None = None) -> None:
    exit_plan.lines_followed = True
    record = record_of(Line(*call, (rank,), (_host,)), prefix=prefix)
    logging.getLogger(record.name).handle(record)


# Lines logged before rank 0 had opened the channel; they are sent before the first line after that.
_kept_back: deque[LogCall] = deque(maxlen=10_000)
_releasing = threading.RLock()
_waiter: threading.Thread | None = None
_cached: tuple[RankGroup | None, LineSender | None] = None, None
on_flush(_print_kept_back)
atexit.register(_print_kept_back)
