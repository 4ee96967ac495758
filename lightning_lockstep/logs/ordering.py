"""Log lines as data, and lines of all ranks brought into rank order."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from lightning_lockstep._text import ranks_in_words

# -- A log line on its way between ranks, and how equal lines of several ranks become one --

# Attributes that every LogRecord has; whatever else a record carries came with `extra`.
_BLANK = vars(logging.makeLogRecord({}))
_STANDARD = frozenset(_BLANK) | {"message", "asctime", "taskName"}

#: One call of a logger, as its caller hands it over: ((logger, level, path, line), text, created, function,
#: trace, extra). A plain tuple, since the caller waits while it is made.
LogCall = tuple[tuple[str, int, str, int], str, float, str, str, dict[str, Any]]

_NOTHING: Mapping[str, Any] = {}


class CallSite(NamedTuple):
    """Which call of a program a line comes from, and how often its rank has made that call before."""

    # Ranks that run the same program make the same call at the same site; that is how their lines are
    # matched.

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


# -- Which lines are printed when: the decisions of rank-ordered logging, without any threads or clocks --
# Lines of one call site wait for each other. They are printed in rank order when every rank that will ever
# log there has done so, or when the first of them has waited long enough.

# How many printed keys are remembered for lines that come after theirs were printed.
_REMEMBERED = 10_000


@dataclass(frozen=True)
class Batch:
    """Lines that belong together, ready to be printed."""

    lines: tuple[Line, ...]  # in rank order, equal ones merged if so asked
    missing: tuple[int, ...] = ()  # ranks whose line did not come in time
    late: bool = False  # the other ranks' lines were printed before
    waited: float = 0.0  # how long the first line was held back [s]


@dataclass
class _Waiting:
    since: float
    lines: list[Line]
    ranks: set[int]


class LineOrdering:
    """Holds lines back until they can be printed in rank order."""

    def __init__(
        self,
        ranks: Iterable[int],  # whose lines are awaited
        *,
        timeout: float = 5.0,  # longest time that a line waits for those of other ranks [s]
        merging: bool = True,  # whether equal lines become one
        once: bool = False,  # one line of all with the same text is enough, wherever they were logged
    ) -> None:
        self.ranks = frozenset(ranks)
        self.timeout, self.merging = timeout, merging
        self._once = once
        self._waiting: OrderedDict[Hashable, _Waiting] = OrderedDict()
        self._overdue: OrderedDict[Hashable, set[int]] = OrderedDict()
        self._levels: dict[tuple[int, str], int] = {}

    @property
    def holds_lines(self) -> bool:
        """Whether a line is held back."""
        return bool(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether a line of one rank would wait for the other ranks, whatever its text."""
        return not (self._waiting or self._levels or self._overdue)

    def add(self, line: Line, now: float, *, waits: bool = True) -> list[Batch]:
        """Take a line, at ``now`` [s] of a clock that never goes back, and return what can be printed."""
        for rank in line.ranks:
            if line.site.level < self._levels.get((rank, line.site.logger), 0):
                del self._levels[rank, line.site.logger]
        site = line.site
        key = (site.logger, site.level, line.text, site.repeat) if self._once else site
        overdue = self._overdue.get(key)
        if overdue is not None and overdue.issuperset(line.ranks):
            overdue.difference_update(line.ranks)
            if not overdue:
                del self._overdue[key]
            return [] if self._once else [Batch((line,), late=True)]
        waiting = self._waiting.setdefault(key, _Waiting(now, [], set()))
        waiting.lines.append(line)
        waiting.ranks.update(line.ranks)
        return [] if waits and self._awaited(waiting) else [self._print(key, now)]

    def note_level(self, rank: int, logger: str, level: int) -> list[Batch]:
        """Note that a rank logs nothing below ``level`` in a logger; return what need not wait any more."""
        self._levels[rank, logger] = level
        complete = [key for key, waiting in self._waiting.items() if not self._awaited(waiting)]
        return [self._print(key, 0.0) for key in complete]

    def due(self, now: float) -> list[Batch]:
        """Return what has waited long enough."""
        keys = [key for key, waiting in self._waiting.items() if now - waiting.since >= self.timeout]
        return [self._print(key, now) for key in keys]

    def next_due(self) -> float:
        """Return when :meth:`due` will next have something [s]; infinity while nothing waits."""
        # They are kept in the order of their first line, so the first one is due first.
        first = next(iter(self._waiting.values()), None)
        return math.inf if first is None else first.since + self.timeout

    def flush(self, now: float) -> list[Batch]:
        """Return all that is held back."""
        return [self._print(key, now) for key in list(self._waiting)]

    def _awaited(self, waiting: _Waiting) -> set[int]:
        site = waiting.lines[0].site
        absent = self.ranks - waiting.ranks
        return {rank for rank in absent if self._levels.get((rank, site.logger), 0) <= site.level}

    def _print(self, key: Hashable, now: float) -> Batch:
        waiting = self._waiting.pop(key)
        missing = self._awaited(waiting)
        if missing:
            self._overdue[key] = set(missing)
            while len(self._overdue) > _REMEMBERED:
                self._overdue.popitem(last=False)
        merges = self.merging and len(waiting.lines) > 1
        lines = merge_equal(waiting.lines) if merges else sorted(waiting.lines, key=by_rank)
        told = () if self._once else tuple(sorted(missing))
        return Batch(tuple(lines), told, waited=now - waiting.since)


# -- Lets several threads bring lines to one place without making any of them wait for a slow console --

Work = Callable[[], list[Batch]]
# Longest time between two looks at what has waited long enough [s].
_LOOK_EVERY = 0.25


class OrderingThread:
    """Owns orderings of lines and prints what comes out of them."""

    # The thread of the channel's handlers does its work at once and prints, without a detour over another
    # thread. The main thread only queues its work; the next thread that has access to the ordering does it.

    def __init__(
        self,
        # Called by one thread at a time, in the order in which batches were ready.
        print_batch: Callable[[Batch], None],
        ordering: LineOrdering,
        *others: LineOrdering,
    ) -> None:
        self.ordering, self._orderings = ordering, (ordering, *others)
        self._print_batch = print_batch
        self._queued: deque[Work] = deque()
        self._ready: deque[Batch] = deque()
        self._access = threading.Lock()
        self._printing = threading.RLock()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = False
        self._thread: threading.Thread | None = None

    def receive(self, packed: Sequence[Any]) -> None:
        """Take a line of another rank, packed, and print what is ready, on this thread."""
        now = time.monotonic()
        self._queue(lambda: self.ordering.add(Line.unpack(packed), now))
        self._run()

    def add(self, make: Callable[[], Line]) -> None:
        """Take a line of this rank, made on another thread in the order of the calls; returns at once."""
        now = time.monotonic()
        self._queue(lambda: self.ordering.add(make(), now))
        # A line that can only wait wakes nobody: whoever comes to the ordering next takes it along, the
        # thread of this object at the latest. The order matters: the line was queued before this look. So
        # whoever fills the ordering now finds the line queued, too, or this look finds the ordering filled.
        if not self.ordering.empty:
            self._wake.put(None)

    def do(self, work: Work) -> None:
        """Have ``work`` done soon, on another thread; returns at once."""
        self._queue(work)
        self._wake.put(None)

    @property
    def busy(self) -> bool:
        """Whether a line waits for those of other ranks."""
        return bool(self._queued) or self.ordering.holds_lines

    def flush(self) -> None:
        """Print all that is held back, here, and wait for a thread that is just printing."""
        self._queued.append(lambda: self._from_all(LineOrdering.flush))
        # Another thread may have access, with lines in hand that it has not laid out for printing yet.
        # The limit is for a signal handler that has interrupted its own thread there.
        if self._access.acquire(timeout=1.0):
            self._access.release()
        self._run()

    def stop(self) -> None:
        self._ended = True
        self._wake.put(None)

    def _from_all(self, what: Callable[[LineOrdering, float], list[Batch]]) -> list[Batch]:
        now = time.monotonic()
        return [batch for ordering in self._orderings for batch in what(ordering, now)]

    def _queue(self, work: Work) -> None:
        self._queued.append(work)
        if self._thread is None and not self._ended:
            self._thread = threading.Thread(
                target=self._print_when_due, name="lockstep-log-order", daemon=True
            )
            with suppress(RuntimeError):  # Python is exiting, and prints what is queued at the end
                self._thread.start()

    def _run(self) -> None:
        """Do the work that is queued, unless another thread is about to, and print."""
        while self._queued and self._access.acquire(blocking=False):
            try:
                while self._queued:
                    self._ready.extend(self._queued.popleft()())
            finally:
                self._access.release()
        with self._printing:
            while self._ready:
                self._print_batch(self._ready.popleft())

    def _print_when_due(self) -> None:
        while not self._ended:
            self._queued.append(lambda: self._from_all(LineOrdering.due))
            self._run()
            with self._access:
                due = min(one.next_due() for one in self._orderings)
            if self._queued:
                continue  # somebody came while this thread had access, and has left work here
            with suppress(queue.Empty):
                self._wake.get(timeout=min(max(0.0, due - time.monotonic()), _LOOK_EVERY))
