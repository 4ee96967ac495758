"""A log line on its way between ranks, and how equal lines of several ranks become one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from lightning_lockstep._text import ranks_in_words

__all__ = [
    "CallSite",
    "Line",
    "LogCall",
    "by_rank",
    "call_of",
    "extra_of",
    "format_message",
    "line_of",
    "merge_equal",
    "record_of",
]

# Attributes that every LogRecord has; whatever else a record carries came with `extra`.
_BLANK = vars(logging.makeLogRecord({}))
_STANDARD = frozenset(_BLANK) | {"message", "asctime", "taskName"}

#: One call of a logger, as its caller hands it over: ((logger, level, path, line), text, created, function,
#: trace, extra). A plain tuple, since the caller waits while it is made.
LogCall = tuple[tuple[str, int, str, int], str, float, str, str, dict[str, Any]]

_NOTHING: Mapping[str, Any] = {}


class CallSite(NamedTuple):
    """Which call of a program a line comes from, and how often its rank has made that call before.

    Ranks that run the same program make the same call at the same site; that is how their lines are matched.
    """

    logger: str
    level: int
    path: str
    line: int
    repeat: int


class Line(NamedTuple):
    """One message of one or several ranks."""

    site: CallSite
    ranks: tuple[int, ...]  # that logged it, rising
    hosts: tuple[str, ...]  # theirs, in the same order
    text: str  # with the arguments filled in
    created: float  # when the first of them logged it [s since the epoch]
    function: str = ""  # that made the call
    trace: str = ""  # formatted exception; empty: none
    extra: Mapping[str, Any] = _NOTHING  # what the caller passed as ``extra``, as far as JSON can hold it

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Line:
        """Return the line that JSON has made a list of."""
        site, ranks, hosts, *rest = packed
        return cls(CallSite(*site), tuple(ranks), tuple(hosts), *rest)


def format_message(msg: object, args: Any) -> str:
    """Return the text as :meth:`logging.LogRecord.getMessage` would, and a text even if the arguments do not fit."""
    try:
        text = str(msg)
        if args:
            one_mapping = len(args) == 1 and isinstance(args[0], Mapping) and args[0]
            text = text % (args[0] if one_mapping else args)
    except Exception as error:  # as in `logging`, a faulty line must not end the program
        return f"{msg!r} with {args!r}, which cannot be filled in: {type(error).__name__}: {error}"
    return text


def call_of(record: logging.LogRecord) -> LogCall:
    """Return the call that made a log record of this rank, with its arguments filled in."""
    trace = ""
    if record.exc_info:
        trace = logging.Formatter().formatException(record.exc_info)
    if record.stack_info:
        trace = f"{trace}\n{record.stack_info}".strip()
    site = (record.name, record.levelno, record.pathname, record.lineno)
    text = format_message(record.msg, record.args)
    return site, text, record.created, record.funcName or "", trace, _as_json(extra_of(record))


def extra_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return what the caller passed as ``extra``."""
    return {k: v for k, v in vars(record).items() if k not in _STANDARD and not k.startswith("lockstep_")}


def line_of(call: LogCall, *, rank: int, host: str, repeat: int) -> Line:
    """Return the line of one rank, which has made the same call ``repeat`` times before."""
    (logger, level, path, number), text, created, function, trace, extra = call
    site = CallSite(logger, level, _resolved(path), number, repeat)
    return Line(site, (rank,), (host,), text, created, function, trace, extra)


def record_of(line: Line, *, prefix: str | None = None) -> logging.LogRecord:
    """Return the record that prints ``line`` where lines are collected; no prefix: its ranks in brackets."""
    site = line.site
    prefix = f"[{ranks_in_words(line.ranks)}] " if prefix is None else prefix
    filename = site.path.rpartition("/")[2]
    standard = {
        "name": site.logger,
        "levelno": site.level,
        "levelname": logging.getLevelName(site.level),
        "pathname": site.path,
        "filename": filename,
        "module": filename.rpartition(".")[0] or filename,
        "lineno": site.line,
        "funcName": line.function,
        "msg": prefix + line.text,
        "created": line.created,
        "msecs": (line.created - int(line.created)) * 1000.0,
        "exc_text": line.trace or None,
        "lockstep_prefix": prefix,
        "lockstep_ranks": line.ranks,
        "lockstep_hosts": line.hosts,
        "lockstep_collected": True,
    }
    record = _blank_record()
    record.__dict__.update({**line.extra, **standard})
    return record


def merge_equal(lines: Iterable[Line]) -> list[Line]:
    """Make one line of those with the same text, ordered by their lowest rank."""
    same: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        same.setdefault((line.text, line.trace), []).append(line)
    merged = [group[0] if len(group) == 1 else _merged(group) for group in same.values()]
    return sorted(merged, key=by_rank)


def by_rank(line: Line) -> tuple[int, ...]:
    """Return what lines of one call site are sorted by."""
    return line.ranks


@lru_cache(maxsize=1000)
def _resolved(path: str) -> str:
    """Return the one name of a file that one rank may know as ``../train.py`` and another by a link."""
    return os.path.realpath(path)


def _blank_record() -> logging.LogRecord:
    if logging.getLogRecordFactory() is not logging.LogRecord:
        return logging.makeLogRecord({})
    # What the constructor finds out about the thread and the caller is about to be replaced.
    record = logging.LogRecord.__new__(logging.LogRecord)
    record.__dict__.update(_BLANK)
    record.process = os.getpid()
    return record


def _merged(group: list[Line]) -> Line:
    hosts = {rank: host for line in group for rank, host in zip(line.ranks, line.hosts, strict=True)}
    ranks = tuple(sorted(hosts))
    return group[0]._replace(
        ranks=ranks,
        hosts=tuple(hosts[rank] for rank in ranks),
        created=min(line.created for line in group),
    )


def _as_json(extra: dict[str, Any]) -> dict[str, Any]:
    if not extra:
        return extra
    try:
        copy: dict[str, Any] = json.loads(json.dumps(extra, default=str))
    except (TypeError, ValueError):  # keys that JSON cannot hold, a list that holds itself
        copy = {name: str(value) for name, value in extra.items()}
    return copy
