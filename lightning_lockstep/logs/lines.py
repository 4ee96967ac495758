"""A log line on its way between ranks, and how equal lines of several ranks become one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = [
    "Line",
    "Place",
    "Said",
    "by_rank",
    "filled_in",
    "fold",
    "line_of",
    "rank_list",
    "record_of",
    "said_of",
]

# Attributes that every LogRecord has; whatever else a record carries came with `extra`.
_BLANK = vars(logging.makeLogRecord({}))
_OWN = frozenset(_BLANK) | {"message", "asctime", "taskName"}


#: What one call of a logger says, as its caller hands it over: ((logger, level, path, line), text, created,
#: function, trace, extra). A plain tuple, since the caller waits while it is made.
Said = tuple[tuple[str, int, str, int], str, float, str, str, dict[str, Any]]


_NOTHING: Mapping[str, Any] = {}


class Place(NamedTuple):
    """Which call of a program a line comes from, and the how-manieth time that call was made.

    Ranks that run the same program make the same call at the same place; that is how their lines are matched.
    """

    logger: str
    level: int
    path: str
    line: int
    turn: int


class Line(NamedTuple):
    """One message of one or several ranks.

    Attributes:
        place: Where it comes from.
        ranks: Ranks that said it, in rising order.
        hosts: Their hosts, in the same order.
        text: What was said, with its arguments filled in.
        created: When the first of them said it [s since the epoch].
        function: Name of the function that made the call.
        trace: Formatted exception; empty if there is none.
        extra: What the caller passed as ``extra``, as far as JSON can hold it.
    """

    place: Place
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    text: str
    created: float
    function: str = ""
    trace: str = ""
    extra: Mapping[str, Any] = _NOTHING

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Line:
        """Return the line that JSON has made a list of."""
        where, ranks, hosts, *rest = packed
        return cls(Place(*where), tuple(ranks), tuple(hosts), *rest)


def filled_in(msg: object, args: Any) -> str:
    """Return the text as :meth:`logging.LogRecord.getMessage` would, and a text even if the arguments do not fit."""
    try:
        text = str(msg)
        if args:
            one_mapping = len(args) == 1 and isinstance(args[0], Mapping) and args[0]
            text = text % (args[0] if one_mapping else args)
    except Exception as error:  # as in `logging`, a faulty line must not end the program
        return f"{msg!r} with {args!r}, which cannot be filled in: {type(error).__name__}: {error}"
    return text


def said_of(record: logging.LogRecord) -> Said:
    """Return what a log record of this rank says, with its arguments filled in."""
    trace = ""
    if record.exc_info:
        trace = logging.Formatter().formatException(record.exc_info)
    if record.stack_info:
        trace = f"{trace}\n{record.stack_info}".strip()
    place = (record.name, record.levelno, record.pathname, record.lineno)
    return (
        place,
        filled_in(record.msg, record.args),
        record.created,
        record.funcName or "",
        trace,
        _extra(record),
    )


def line_of(said: Said, *, rank: int, host: str, turn: int) -> Line:
    """Return the line of one rank.

    Args:
        said: What it said.
        rank: The rank.
        host: Its host.
        turn: How often the same call was made before.
    """
    (logger, level, path, number), text, created, function, trace, extra = said
    place = Place(logger, level, _resolved(path), number, turn)
    return Line(place, (rank,), (host,), text, created, function, trace, extra)


@lru_cache(maxsize=1000)
def _resolved(path: str) -> str:
    """Return the one name of a file that one rank may know as ``../train.py`` and another by a link."""
    return os.path.realpath(path)


def record_of(line: Line, *, prefix: str | None = None) -> logging.LogRecord:
    """Return the log record that prints ``line`` in the process that collects them.

    Args:
        line: The line.
        prefix: What stands before the text; by default the ranks in brackets.
    """
    p = line.place
    prefix = f"[{rank_list(line.ranks)}] " if prefix is None else prefix
    filename = p.path.rpartition("/")[2]
    own = {
        "name": p.logger,
        "levelno": p.level,
        "levelname": logging.getLevelName(p.level),
        "pathname": p.path,
        "filename": filename,
        "module": filename.rpartition(".")[0] or filename,
        "lineno": p.line,
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
    record.__dict__.update({**line.extra, **own})
    return record


def fold(lines: Iterable[Line]) -> list[Line]:
    """Make one line of those that say the same, ordered by their lowest rank.

    Args:
        lines: Lines of one place.
    """
    same: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        same.setdefault((line.text, line.trace), []).append(line)
    folded = [group[0] if len(group) == 1 else _merged(group) for group in same.values()]
    return sorted(folded, key=by_rank)


def _blank_record() -> logging.LogRecord:
    if logging.getLogRecordFactory() is not logging.LogRecord:
        return logging.makeLogRecord({})
    # What the constructor finds out about the thread and the caller is about to be replaced.
    record = logging.LogRecord.__new__(logging.LogRecord)
    record.__dict__.update(_BLANK)
    record.process = os.getpid()
    return record


def by_rank(line: Line) -> tuple[int, ...]:
    """Return what lines of one place are sorted by."""
    return line.ranks


def rank_list(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 3``, ``ranks 0-7``, ``ranks 0-2,5``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def _merged(group: list[Line]) -> Line:
    hosts = {rank: host for line in group for rank, host in zip(line.ranks, line.hosts, strict=True)}
    ranks = tuple(sorted(hosts))
    return group[0]._replace(
        ranks=ranks,
        hosts=tuple(hosts[rank] for rank in ranks),
        created=min(line.created for line in group),
    )


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    own = {k: v for k, v in vars(record).items() if k not in _OWN and not k.startswith("lockstep_")}
    if not own:
        return own
    try:
        copy: dict[str, Any] = json.loads(json.dumps(own, default=str))
    except (TypeError, ValueError):  # keys that JSON cannot hold, a list that holds itself
        copy = {name: str(value) for name, value in own.items()}
    return copy
