"""How a log record looks: on the console, in a file, as a line of JSON."""

from __future__ import annotations

import json
import logging
import socket
import time
from typing import Any, ClassVar

from lightning_lockstep.logs.lines import rank_list

__all__ = ["ConsoleFormat", "JsonFormat", "TextFormat", "who"]

_host = socket.gethostname()
_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def who(record: logging.LogRecord, own_rank: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ranks that said it and their hosts; by default this rank on this host."""
    ranks = getattr(record, "lockstep_ranks", (own_rank,))
    return ranks, getattr(record, "lockstep_hosts", (_host,) * len(ranks))


def said(record: logging.LogRecord) -> str:
    """Return the message without the ranks that an adapter has put before it."""
    text = record.getMessage()
    # A prefix that says more than the ranks ("late") stays.
    prefix = getattr(record, "lockstep_prefix", "")
    ranks = getattr(record, "lockstep_ranks", None)
    return (text[len(prefix) :] if ranks and prefix == f"[{rank_list(ranks)}] " else text).rstrip("\n")


class TextFormat(logging.Formatter):
    """``time level host:rank logger file:line message``, for a rank's own file.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """See :meth:`logging.Formatter.format`."""
        head = f"{self.when(record)} {record.levelname:<8} {self.speaker(record)} {self.place(record)}"
        return self.with_traces(f"{head} {said(record)}", record)

    def when(self, record: logging.LogRecord) -> str:
        """Return the local time, with milliseconds."""
        return time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"

    def speaker(self, record: logging.LogRecord) -> str:
        """Return ``host:rank``; several ranks in short, with the host where they share one."""
        ranks, hosts = who(record, self.rank)
        names = sorted({host for host in hosts if host})
        where = names[0] if len(names) == 1 else f"{len(names)} hosts" if names else _host
        return f"{where}:{rank_list(ranks).split(' ', 1)[1]}"

    def place(self, record: logging.LogRecord) -> str:
        """Return the logger and the place of the call."""
        # Python's warnings name their place in the text; the call is always the same one in `warnings`.
        return (
            record.name
            if record.name == "py.warnings"
            else f"{record.name} {record.filename}:{record.lineno}"
        )

    def with_traces(self, text: str, record: logging.LogRecord) -> str:
        """Append the record's traceback and stack, if it has any."""
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        parts = [text, record.exc_text, self.formatStack(record.stack_info) if record.stack_info else None]
        return "\n".join(part for part in parts if part)


class ConsoleFormat(TextFormat):
    """``time level host:rank logger file:line message``, coloured by rich where asked.

    Args:
        rank: This rank.
        colour: Whether to write colours.
    """

    _STYLES: ClassVar = {
        "DEBUG": "dim",
        "INFO": "green",
        "WARNING": "yellow",
        "ERROR": "red",
        "CRITICAL": "bold red",
    }

    def __init__(self, rank: int, *, colour: bool) -> None:
        super().__init__(rank)
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """See :meth:`logging.Formatter.format`."""
        level = f"{record.levelname:<8}"
        parts = [
            (self.when(record), "dim"),
            (level, self._STYLES.get(record.levelname, "")),
            (self.speaker(record), "cyan"),
            (self.place(record), "dim"),
            (said(record), ""),
        ]
        text = " ".join(_coloured(part, style) if self.colour else part for part, style in parts)
        return self.with_traces(text, record)


class JsonFormat(TextFormat):
    """One JSON object a line, with what the caller passed as ``extra`` under its own names."""

    def format(self, record: logging.LogRecord) -> str:
        """See :meth:`logging.Formatter.format`."""
        ranks, hosts = who(record, self.rank)
        entry: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "rank": ranks[0] if len(ranks) == 1 else list(ranks),
            "host": hosts[0] if len(set(hosts)) == 1 else list(hosts),
            "logger": record.name,
            "message": said(record),
            "file": record.pathname,
            "line": record.lineno,
            "function": record.funcName,
        }
        trace = self.with_traces("", record)
        if trace:
            entry["trace"] = trace
        extra = {k: v for k, v in vars(record).items() if k not in _KNOWN and not k.startswith("lockstep_")}
        return json.dumps({**extra, **entry}, default=str)


def _coloured(text: str, style: str) -> str:
    if not style:
        return text
    from rich.style import Style

    return Style.parse(style).render(text)
