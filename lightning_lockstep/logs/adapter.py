"""Loggers that know about ranks."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from lightning_lockstep import _environment
from lightning_lockstep._lightning import rank_zero_only
from lightning_lockstep.distributed.channel_opening import current_group, known_rank, side_channel_if_open
from lightning_lockstep.distributed.flushing import on_flush
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.logs.collector import LineSender, sender_on
from lightning_lockstep.logs.lines import Line, line_of, record_of

__all__ = ["RankLogger", "get_logger"]

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_host = socket.gethostname()

# Handlers of this rank's own files: they get a line where it is made, not where it is printed.
local_handlers: list[logging.Handler] = []


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Return a logger whose lines are printed by the main rank, by all, or by all in rank order.

    Args:
        name: Name of the logger, ``__name__`` as a rule.
        log_level: Its level; by default ``LOCKSTEP_LOG_LEVEL``, and where that is not set the level is left
            as it is. Only this logger's level is set, never the root logger's.

    Returns:
        An adapter with the methods of :class:`logging.Logger`; see :class:`RankLogger`.

    Raises:
        ConfigurationError: There is no such level.

    Ranks: any rank, at any time, with or without a distributed run; nothing is sent.
    """
    level = _environment.log_level() if log_level is None else _checked(log_level)
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level)
    return RankLogger(logger)


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """An adapter over a standard logger, with three more keywords on every method.

    ``main_process_only=True`` (the default) prints on the main rank only, ``main_process_only=False`` on
    every rank that makes the call. ``in_order=True`` prints the lines of all ranks in rank order, through
    rank 0. ``extra``, ``exc_info``, ``stack_info``, ``stacklevel`` and ``%`` arguments are as in
    :mod:`logging`.

    Args:
        logger: The logger underneath.

    Ranks: any rank may call any method alone. ``in_order`` posts one message and returns; no rank ever
    waits, and a line whose other ranks do not come is printed after ``order_timeout`` with their numbers.
    """

    logger: logging.Logger

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})

    def log(  # type: ignore[override]
        self,
        level: int,
        msg: object,
        *args: object,
        main_process_only: bool = True,
        in_order: bool = False,
        **kwargs: Any,
    ) -> None:
        """Log ``msg % args`` at ``level``; see the class for the keywords."""
        if not self.logger.isEnabledFor(level):
            if in_order:
                _tell_level(self.logger)
            return
        if in_order and not kwargs and not local_handlers and not self.logger.filters:
            connected = _connected()
            if connected is not None:
                self._post(connected, level, msg, args)
                return
        rank, world_size = _who_am_i()
        if main_process_only and not in_order:
            if rank == 0:
                self._handle(level, msg, args, kwargs)
        elif world_size == 1 and rank == 0:
            self._handle(level, msg, args, kwargs)
        elif in_order:
            self._in_order(rank, self._record(level, msg, args, kwargs))
        else:
            record = self._record(level, msg, args, kwargs)
            _mark(record, rank)
            self.logger.handle(record)

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning unless this logger has logged the same text before in this run.

        With ``main_process_only=False`` the ranks share the answer as soon as they are connected: of all
        ranks' equal warnings one is printed.
        """
        text = str(msg) % args if args else str(msg)
        with _once_lock:
            if (self.logger.name, text) in _said_once:
                return
            _said_once.add((self.logger.name, text))
        plain = kwargs.get("main_process_only", True) or kwargs.get("in_order", False)
        rank, world_size = _who_am_i()
        if plain or world_size == 1 or not self.logger.isEnabledFor(logging.WARNING):
            self.log(logging.WARNING, msg, *args, **kwargs)
            return
        kwargs.pop("main_process_only")
        record = self._record(logging.WARNING, msg, args, kwargs)
        to_local_files(record)
        line = line_of(record, rank=rank, host=_host, turn=0)
        if not _hand_over(lambda sender: sender.send_once(line)):
            self._say_here(rank, record)

    def _record(self, level: int, msg: object, args: Any, kwargs: dict[str, Any]) -> logging.LogRecord:
        exc_info = kwargs.pop("exc_info", None)
        if isinstance(exc_info, BaseException):
            exc_info = (type(exc_info), exc_info, exc_info.__traceback__)
        elif exc_info and not isinstance(exc_info, tuple):
            exc_info = sys.exc_info()
        frame = _caller(kwargs.pop("stacklevel", 1))
        stack = _stack(frame) if kwargs.pop("stack_info", False) else None
        extra = kwargs.pop("extra", None)
        if kwargs:
            names = ", ".join(sorted(kwargs))
            raise TypeError(f"a logging call got keywords that it does not know: {names}")
        code = frame.f_code
        return self.logger.makeRecord(
            self.logger.name,
            level,
            code.co_filename,
            frame.f_lineno,
            msg,
            args,
            exc_info,
            code.co_name,
            extra,
            stack,
        )

    def _handle(self, level: int, msg: object, args: Any, kwargs: dict[str, Any]) -> None:
        self.logger.handle(self._record(level, msg, args, kwargs))

    def _post(self, sender: LineSender, level: int, msg: object, args: Any) -> None:
        """Send a line without a LogRecord, whose making costs more than all the rest."""
        frame = _caller(1)
        code = frame.f_code
        place = (self.logger.name, level, code.co_filename, frame.f_lineno)
        turn = _turns.get(place, 0)
        _turns[place] = turn + 1
        text = str(msg)
        if args:
            one_mapping = len(args) == 1 and isinstance(args[0], Mapping) and args[0]
            text = text % (args[0] if one_mapping else args)
        ranks = (sender.channel.rank,)
        sender.send(((*place, turn), ranks, (_host,), text, time.time(), code.co_name, "", {}))

    def _in_order(self, rank: int, record: logging.LogRecord) -> None:
        if not self.logger.filter(record):
            return
        to_local_files(record)
        place = (record.name, record.levelno, record.pathname, record.lineno)
        turn = _turns.get(place, 0)
        _turns[place] = turn + 1
        packed = line_of(record, rank=rank, host=_host, turn=turn).pack()
        if not _hand_over(lambda sender: sender.send(packed)):
            self._say_here(rank, record)

    def _say_here(self, rank: int, record: logging.LogRecord) -> None:
        _mark(record, rank)
        record.lockstep_collected = True  # this rank's files have it already
        self.logger.handle(record)


def to_local_files(record: logging.LogRecord) -> None:
    """Give a record that is printed elsewhere to this rank's own files."""
    for handler in local_handlers:
        if record.levelno >= handler.level:
            handler.handle(record)


def _checked(level: str | int) -> str | int:
    if isinstance(level, str) and level.upper() in LEVELS:
        return level.upper()
    if isinstance(level, int) and not isinstance(level, bool) and level >= 0:
        return level
    raise ConfigurationError(f"log_level={level!r}: expected one of {', '.join(LEVELS)}, or a number from 0.")


def _who_am_i() -> tuple[int, int]:
    """Return (rank, world size); before the ranks have met the rank is what the environment says."""
    known = known_rank()
    if known is not None:
        return known
    return int(getattr(rank_zero_only, "rank", 0) or 0), 1


def _mark(record: logging.LogRecord, rank: int) -> None:
    prefix = f"[rank {rank}] "
    record.msg = prefix.replace("%", "%%") + str(record.msg)
    record.lockstep_prefix = prefix
    record.lockstep_ranks, record.lockstep_hosts = (rank,), (_host,)


def _caller(stacklevel: int) -> FrameType:
    frame: FrameType | None = sys._getframe(1)
    last = sys._getframe(1)
    while frame is not None:
        last = frame
        if frame.f_code.co_filename not in _SKIPPED_FILES:
            stacklevel -= 1
            if stacklevel <= 0:
                return frame
        frame = frame.f_back
    return last


def _stack(frame: FrameType) -> str:
    return "Stack (most recent call last):\n" + "".join(traceback.format_stack(frame)).rstrip()


def _tell_level(logger: logging.Logger) -> None:
    known = known_rank()
    if known is not None and known[1] > 1:
        level = logger.getEffectiveLevel()
        _hand_over(lambda sender: sender.tell_level(logger.name, level), open_if_easy=False)


_SKIPPED_FILES = (logging.info.__code__.co_filename, _caller.__code__.co_filename)


def _connected() -> LineSender | None:
    """Return the sender of the process group that exists now, as fast as can be."""
    global _cached
    group = current_group()
    if group is None:
        return None
    if _cached is not None and _cached[0] is group:
        sender = _cached[1]
        if sender.channel.usable and sender.process == os.getpid():
            return sender
    found = _sender()
    _cached = None if found is None else (group, found)
    return found


def _sender(*, open_if_easy: bool = True) -> LineSender | None:
    """Return what takes this rank's lines, or ``None`` while the ranks are not connected."""
    known = known_rank()
    if known is None:
        return None
    # Rank 0 can open the channel by itself; another rank would have to ask the store first.
    channel = side_channel_if_open(open_if_easy=open_if_easy and known[0] == 0)
    if channel is None or not channel.usable:
        return None
    sender = sender_on(channel)
    if sender.process != os.getpid():
        return None  # a forked worker has the object but not its threads
    while _kept_back:
        _kept_back.popleft()(sender)
    return sender


def _hand_over(work: Callable[[LineSender], None], *, open_if_easy: bool = True) -> bool:
    """Give ``work`` the sender now, or when rank 0 has opened the channel; return whether that can happen."""
    global _waiter
    sender = _sender(open_if_easy=open_if_easy)
    if sender is not None:
        work(sender)
        return True
    known = known_rank()
    if known is None or known[1] == 1 or side_channel_if_open() is not None:
        return False
    _kept_back.append(work)
    if known[0] != 0 and (_waiter is None or not _waiter.is_alive()):
        _waiter = threading.Thread(target=_look_for_channel, name="lockstep-log-open", daemon=True)
        _waiter.start()
    return True


def _look_for_channel() -> None:
    while known_rank() is not None and side_channel_if_open(open_if_easy=True) is None:
        time.sleep(0.05)
    _sender()


class _SayHere:
    """Stands in for the sender of a run whose rank 0 never opened the channel."""

    def send(self, packed: Sequence[Any]) -> None:
        self.send_once(Line.unpack(packed))

    def send_once(self, line: Line) -> None:
        logging.getLogger(line.place.logger).handle(record_of(line))

    def tell_level(self, logger: str, level: int) -> None:
        """Nobody is there to be told."""


def _say_kept_lines() -> None:
    if known_rank() is not None and side_channel_if_open() is not None:
        _sender()
    while _kept_back:
        _kept_back.popleft()(_SayHere())  # type: ignore[arg-type]


# Lines said while rank 0 had not opened the channel yet; they go out with the first one after that.
_kept_back: deque[Callable[[LineSender], None]] = deque(maxlen=10_000)
_waiter: threading.Thread | None = None
_turns: dict[tuple[str, int, str, int], int] = {}
_cached: tuple[object, LineSender] | None = None
_said_once: set[tuple[str, str]] = set()
_once_lock = threading.Lock()
on_flush(_say_kept_lines)
atexit.register(_say_kept_lines)
