"""How a log record looks: on the console, in a file, as a line of JSON."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

from lightning_lockstep._text import ranges, ranks_in_words
from lightning_lockstep.logs.lines import extra_of

__all__ = ["JsonFormat", "TextFormat"]

_host = socket.gethostname()
_STYLES = {"DEBUG": "dim", "INFO": "green", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


class TextFormat(logging.Formatter):
    """``time level host:rank logger file:line message``, with rich's colours where asked."""

    default_time_format = "%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self, rank: int, *, colour: bool = False) -> None:
        super().__init__()
        self.rank, self.colour = rank, colour

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line without traceback and stack; :meth:`format` appends them."""
        parts = [
            (self.formatTime(record), "dim"),
            (f"{record.levelname:<8}", _STYLES.get(record.levelname, "")),
            (self._source(record), "cyan"),
            (_call_site(record), "dim"),
            (_message(record), ""),
        ]
        return " ".join(_coloured(text, style) if self.colour else text for text, style in parts)

    def _source(self, record: logging.LogRecord) -> str:
        """Return ``host:rank``; several ranks in short, with the host where they share one."""
        ranks, hosts = _origin(record, self.rank)
        names = sorted({host for host in hosts if host})
        host = names[0] if len(names) == 1 else f"{len(names)} hosts" if names else _host
        return f"{host}:{ranges(ranks)}"


class JsonFormat(logging.Formatter):
    """One JSON object a line, with what the caller passed as ``extra`` under its own names."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

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
    """Return the message without the ranks that an adapter has put before it."""
    text = record.getMessage()
    # A prefix that says more than the ranks ("late") stays.
    prefix = getattr(record, "lockstep_prefix", "")
    ranks = getattr(record, "lockstep_ranks", None)
    return (text[len(prefix) :] if ranks and prefix == f"[{ranks_in_words(ranks)}] " else text).rstrip("\n")


def _call_site(record: logging.LogRecord) -> str:
    """Return the logger and where it was called; Python's warnings name their place in the text."""
    return record.name if record.name == "py.warnings" else f"{record.name} {record.filename}:{record.lineno}"


def _coloured(text: str, style: str) -> str:
    if not style:
        return text
    from rich.style import Style

    return Style.parse(style).render(text)
