"""How lines look, on the terminal and in files."""

from __future__ import annotations

import json
import logging
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_lockstep._text import ranges
from lightning_lockstep.logs.collector import WARNING
from lightning_lockstep.logs.logger import LineSender, call_of, extra_of

# -- How a log record looks: on the console, in a file, as a line of JSON --

_host = socket.gethostname()


class TextFormat(logging.Formatter):
    """``time level host:rank logger file:line message``."""

    default_time_format = "%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line without traceback and stack; :meth:`format` appends them."""
        # The text of Python's warnings has its place already.
        is_warning = record.name == "py.warnings"
        place = record.name if is_warning else f"{record.name} {record.filename}:{record.lineno}"
        source = self._source(record)
        return f"{self.formatTime(record)} {record.levelname:<8} {source} {place} {_message(record)}"

    def _source(self, record: logging.LogRecord) -> str:
        """Return ``host:rank``, or for several ranks ``host:0-3`` or ``2 hosts:0-3``."""
        ranks, hosts = _origin(record, self.rank)
        names = sorted({host for host in hosts if host})
        host = names[0] if len(names) == 1 else f"{len(names)} hosts" if names else _host
        return f"{host}:{ranges(ranks)}"


class JsonFormat(TextFormat):
    """One JSON object a line, with what the caller passed as ``extra`` under its own names."""

    def format(self, record: logging.LogRecord) -> str:
        ranks, hosts = _origin(record, self.rank)
        entry: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "rank": ranks[0] if len(ranks) == 1 else list(ranks),
            "host": hosts[0] if len(set(hosts)) == 1 else list(hosts),
            "logger": record.name,
            "message": _message(record),
            "file": record.pathname,
            "line": record.lineno,
            "function": record.funcName,
        }
        trace = super().format(record).strip()
        if trace:
            entry["trace"] = trace
        return json.dumps({**extra_of(record), **entry}, default=str)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return nothing, so that the base class formats traceback and stack alone."""
        return ""


def _origin(record: logging.LogRecord, own_rank: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ranks that logged it and their hosts; by default this rank on this host."""
    ranks = getattr(record, "lockstep_ranks", (own_rank,))
    return ranks, getattr(record, "lockstep_hosts", (_host,) * len(ranks))


def _message(record: logging.LogRecord) -> str:
    """Return the message without the prefix that names its ranks."""
    return record.getMessage().removeprefix(getattr(record, "lockstep_prefix", "")).rstrip("\n")


# -- Where records go: the console of rank 0, this rank's file, and, for warnings, the collector on rank 0 --


class ConsoleHandler(logging.Handler):
    """Writes to the console, above a progress bar if there is one."""

    def __init__(self, rank: int, *, level: int | str) -> None:
        super().__init__(level)
        self.setFormatter(TextFormat(rank))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _write_above_bar(self.format(record))
        except (OSError, ValueError):
            self.handleError(record)


class RankFile(logging.FileHandler):
    """One file per rank, with everything that this rank logs and without lines that were collected from others."""

    def __init__(self, folder: Path, rank: int, *, style: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ending = "jsonl" if style == "json" else "log"
        super().__init__(folder / f"rank-{rank}.{ending}", encoding="utf-8", delay=True)
        self.setFormatter(JsonFormat(rank) if style == "json" else TextFormat(rank))
        self.addFilter(lambda record: not getattr(record, "lockstep_collected", False))


class WarningHandler(logging.Handler):
    """Sends warnings to the collector on rank 0, which prints those that rank 0 does not give itself."""

    def __init__(self, sender: LineSender) -> None:
        super().__init__(logging.WARNING)
        self._sender = sender
        # A record that names its ranks was collected, or is printed by every rank itself.
        self.addFilter(lambda record: not hasattr(record, "lockstep_ranks"))

    def emit(self, record: logging.LogRecord) -> None:
        self._sender.send(call_of(record), WARNING)


def take_over_console(handlers: list[logging.Handler], at_end: ExitStack) -> None:
    """Replace the console handlers of all loggers, of the root, of Lightning and of any other, until ``at_end``."""
    root = logging.getLogger()
    known = logging.Logger.manager.loggerDict.values()
    for logger in [root, *(one for one in known if isinstance(one, logging.Logger))]:
        own = [handler for handler in logger.handlers if _writes_to_console(handler)]
        for handler in reversed(own):  # so that they come back in their order
            logger.removeHandler(handler)
            at_end.callback(logger.addHandler, handler)
        if own and logger is not root and not logger.propagate and not logger.handlers:
            logger.propagate = True
            at_end.callback(setattr, logger, "propagate", False)
    for handler in handlers:
        root.addHandler(handler)
        at_end.callback(handler.close)
        at_end.callback(root.removeHandler, handler)


def _writes_to_console(handler: logging.Handler) -> bool:
    if isinstance(handler, logging.FileHandler):
        return False
    rich_console = type(handler).__name__ == "RichHandler"
    stream = getattr(handler, "stream", None)
    consoles = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return rich_console or (isinstance(handler, logging.StreamHandler) and stream in consoles)


def _write_above_bar(text: str) -> None:
    """Write to standard error, above a progress bar if there is one."""
    # rich redirects ``sys.stderr`` while its bar is shown; tqdm has to be asked.
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is not None and getattr(tqdm, "_instances", None):
        tqdm.write(text, file=sys.stderr)
        return
    # There is one write, so that lines of other processes do not get between the text and its end.
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
