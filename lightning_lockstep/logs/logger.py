"""Loggers that know about ranks."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
import traceback
import warnings
from types import FrameType
from typing import Any

from lightning_lockstep import _settings
from lightning_lockstep._doors.lightning import rank_zero_only
from lightning_lockstep._settings import LEVELS, Faults, is_whole
from lightning_lockstep.distributed.guard.collective_call import is_torch_or_lightning
from lightning_lockstep.distributed.side_channel.opening import known_rank
from lightning_lockstep.logs.ordering import LogCall, call_of, format_message
from lightning_lockstep.logs.sender import STDERR, connected_sender, send_level, with_sender

_host = socket.gethostname()

# Handlers of this rank's own files: they get a line where it is logged, not where it is printed.
local_handlers: list[logging.Handler] = []


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Return a logger whose lines are printed by the main rank, by every rank, or by all ranks in rank order.

    Args:
        name: Name of the logger, usually ``__name__``.
        log_level: Its level; by default ``LOCKSTEP_LOG_LEVEL``, and where that is not set the level is left
            as it is. Only this logger's level is set, never the root logger's.

    Returns:
        An adapter with the methods of :class:`logging.Logger`; see :class:`RankLogger`.

    Raises:
        ConfigurationError: There is no such level.

    Ranks: any rank, at any time, with or without a distributed run; nothing is sent.
    """
    level = _settings.log_level() if log_level is None else _checked(log_level)
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
    waits, and a line that other ranks do not log is printed after ``order_timeout`` with their numbers.
    """

    logger: logging.Logger

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})

    def debug(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log ``msg % args`` at level DEBUG; see the class for the keywords."""
        self._emit(logging.DEBUG, msg, args, kwargs)

    def info(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log ``msg % args`` at level INFO; see the class for the keywords."""
        self._emit(logging.INFO, msg, args, kwargs)

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log ``msg % args`` at level WARNING; see the class for the keywords."""
        self._emit(logging.WARNING, msg, args, kwargs)

    def error(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log ``msg % args`` at level ERROR; see the class for the keywords."""
        self._emit(logging.ERROR, msg, args, kwargs)

    def critical(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log ``msg % args`` at level CRITICAL; see the class for the keywords."""
        self._emit(logging.CRITICAL, msg, args, kwargs)

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log ``msg % args`` at ``level``; see the class for the keywords."""
        self._emit(level, msg, args, kwargs)

    def _emit(self, level: int, msg: object, args: Any, kwargs: dict[str, Any]) -> None:
        logger = self.logger
        if not logger.isEnabledFor(level):
            if kwargs.get("in_order"):
                send_level(logger)
            return
        # The common case first: what a caller waits for is counted in microseconds.
        if len(kwargs) == 1 and kwargs.get("in_order") and not local_handlers and not logger.filters:
            sender = connected_sender()
            if sender is not None:
                frame = sys._getframe(2)
                code = frame.f_code
                if code.co_filename in _SKIPPED_FILES:
                    frame = _caller(1)
                    code = frame.f_code
                site = (logger.name, level, code.co_filename, frame.f_lineno)
                sender.send((site, format_message(msg, args), time.time(), code.co_name, "", {}))
                return
        self._log_record(level, msg, args, kwargs)

    def _log_record(self, level: int, msg: object, args: Any, kwargs: dict[str, Any]) -> None:
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        rank, world_size = _rank_and_world_size()
        plain = (main_process_only and not in_order) or (world_size == 1 and rank == 0)
        if plain and rank != 0:
            return
        record = self._record(level, msg, args, kwargs)
        if in_order and not plain:
            self._send_in_order(rank, record)
            return
        if not plain:
            _mark_rank(record, rank)
        self.logger.handle(record)

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning unless this logger has logged the same text before in this run.

        With ``main_process_only=False`` one of all ranks' equal warnings is printed, as soon as the ranks are
        connected.
        """
        text = format_message(msg, args)
        with _once_lock:
            if (self.logger.name, text) in _warned:
                return
            _warned.add((self.logger.name, text))
        plain = kwargs.get("main_process_only", True) or kwargs.get("in_order", False)
        rank, world_size = _rank_and_world_size()
        if plain or world_size == 1 or not self.logger.isEnabledFor(logging.WARNING):
            self.log(logging.WARNING, msg, *args, **kwargs)
            return
        kwargs.pop("main_process_only")
        record = self._record(logging.WARNING, msg, args, kwargs)
        to_local_files(record)
        call = call_of(record)
        if not with_sender(lambda sender: sender.send_once(call)):
            self._print_here(rank, record)

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

    def _send_in_order(self, rank: int, record: logging.LogRecord) -> None:
        passed = self.logger.filter(record)
        if not passed:
            return
        record = passed if isinstance(passed, logging.LogRecord) else record
        to_local_files(record)
        call = call_of(record)
        if not with_sender(lambda sender: sender.send(call)):
            self._print_here(rank, record)

    def _print_here(self, rank: int, record: logging.LogRecord) -> None:
        _mark_rank(record, rank)
        record.lockstep_collected = True  # this rank's files have it already
        self.logger.handle(record)


def to_local_files(record: logging.LogRecord) -> None:
    """Give a record that is printed elsewhere to this rank's own files."""
    for handler in local_handlers:
        if record.levelno >= handler.level:
            handler.handle(record)


def _checked(level: str | int) -> str | int:
    if isinstance(level, str):
        level = level.upper() if level.upper() in LEVELS else level
    faults = Faults()
    is_level = level in LEVELS or (is_whole(level) and int(level) >= 0)
    faults.check(is_level, "log_level", level, f"one of {', '.join(LEVELS)}, or a number from 0")
    faults.raise_all()
    return level


def _rank_and_world_size() -> tuple[int, int]:
    """Return (rank, world size); before there is a process group the rank is what the environment says."""
    known = known_rank()
    if known is not None:
        return known
    return int(getattr(rank_zero_only, "rank", 0) or 0), 1


def _mark_rank(record: logging.LogRecord, rank: int) -> None:
    prefix = f"[rank {rank}] "
    record.msg = prefix + str(record.msg)
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


_SKIPPED_FILES = (logging.info.__code__.co_filename, _caller.__code__.co_filename)
_warned: set[tuple[str, str]] = set()
_once_lock = threading.Lock()


# -- Warnings that libraries give on every rank --


def fold_library_warnings() -> None:
    """Show once what torch and Lightning warn of in their own files, also where a rank other than 0 alone does."""
    usual = warnings.showwarning
    if usual.__module__ != "warnings":
        return  # whoever collects them does so on

    def show(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        known = known_rank()
        if file is None and known is not None and is_torch_or_lightning(filename):
            text = warnings.formatwarning(message, category, filename, lineno, line).rstrip()
            call: LogCall = ((STDERR, logging.WARNING, filename, lineno), text, time.time(), "", "", {})
            sent = with_sender(lambda sender: sender.send_once(call, printed=known[0] == 0))
            if sent and known[0] != 0:
                return
        usual(message, category, filename, lineno, file, line)

    warnings.showwarning = show
