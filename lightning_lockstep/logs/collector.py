"""Rank 0's side of logging: the lines of all ranks, put together for each call site and printed in rank order.

Lines of one call site wait for those of the other ranks in a window. It is printed once every rank has logged equally
many lines there, at the latest when its first line has waited for ``order_timeout``. Its lines are then divided by
when they came, so that a line which one rank has left out shifts none of those that follow.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed import SideChannel
from lightning_lockstep.distributed.failure.process_exit import on_flush, outcome

# -- A log line on its way between ranks --

#: (logger, level, path, line, text, created, function, trace, extra): the fields of :class:`Line` that a call has.
LogCall = tuple[str, int, str, int, str, float, str, str, Mapping[str, Any]]
# A line that a rank has logged in order, and a warning of which one is enough.
LINE, WARNING = "log/line", "log/warning"


class Line(NamedTuple):
    """One message of one or several ranks."""

    logger: str
    level: int
    path: str
    number: int  # of the line in the file
    text: str  # with the arguments filled in
    created: float  # when the first of the ranks logged it [s since the epoch]
    function: str  # that made the call
    trace: str  # formatted exception; empty: none
    extra: Mapping[str, Any]  # what the caller passed as ``extra``, as far as JSON can hold it
    ranks: tuple[int, ...]  # that logged it, rising
    hosts: tuple[str, ...]  # theirs, in the same order


def record_of(line: Line, *, prefix: str | None = None) -> logging.LogRecord:
    """Return the record that prints ``line``; no prefix: its ranks in brackets, which our formats show elsewhere."""
    ranks = f"[{ranks_in_words(line.ranks)}] "
    filename = line.path.rpartition("/")[2]
    standard = {
        "name": line.logger,
        "levelno": line.level,
        "levelname": logging.getLevelName(line.level),
        "pathname": line.path,
        "filename": filename,
        "module": filename.rpartition(".")[0] or filename,
        "lineno": line.number,
        "funcName": line.function,
        "msg": (ranks if prefix is None else prefix) + line.text,
        "created": line.created,
        "msecs": (line.created - int(line.created)) * 1000.0,
        "exc_text": line.trace or None,
        "lockstep_prefix": ranks if prefix is None else "",
        "lockstep_ranks": line.ranks,
        "lockstep_hosts": line.hosts,
        "lockstep_collected": True,
    }
    return logging.makeLogRecord({**line.extra, **standard})


def with_real_path(call: LogCall) -> LogCall:
    """Name the file as on the other ranks: one may know it as ``../train.py`` and another by a link."""
    return *call[:2], _real_path(call[2]), *call[3:]


@lru_cache(maxsize=1000)
def _real_path(path: str) -> str:
    return os.path.realpath(path)


def merge_equal(lines: Iterable[Line]) -> list[Line]:
    """Make one line of those with the same text, ordered by their lowest rank."""
    same: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        same.setdefault((line.text, line.trace), []).append(line)
    return [
        group[0]._replace(
            ranks=tuple(rank for line in group for rank in line.ranks),
            hosts=tuple(host for line in group for host in line.hosts),
            created=min(line.created for line in group),
        )
        for group in same.values()
    ]


# -- Which lines are printed when: decided without threads or clocks --

# A window in which one rank was missing throughout may have ended before that rank's line came. For a while its call
# site's next window, which may begin with that line, is printed only when nothing has come for some time [s].
_UNSURE_FOR, _SETTLES_AFTER = 60.0, 0.2

_Arrived = tuple[float, Line]
_Window = dict[int, list[_Arrived]]  # the lines of each rank


class Batch(NamedTuple):
    """Lines of one call, ready to be printed."""

    site: tuple[Any, ...]
    lines: list[Line]  # of different ranks, rising
    missing: tuple[int, ...]  # ranks that have logged fewer lines than others in this window
    waited: float  # how long the first line was held back [s]


class Windows:
    """Lines of each call site that wait for those of other ranks."""

    def __init__(self, world_size: int, *, timeout: float = 5.0) -> None:
        self.world_size = world_size
        self.timeout = timeout  # longest time that a line waits for those of other ranks [s]
        self._open: dict[tuple[Any, ...], _Window] = {}
        self._unsure: dict[tuple[Any, ...], float] = {}  # since when [s]

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, site: tuple[Any, ...], line: Line, now: float) -> list[Batch]:
        """Take a line, at ``now`` [s] of a clock that never goes back, and return what can be printed."""
        window = self._open.setdefault(site, {})
        window.setdefault(line.ranks[0], []).append((now, line))
        return [] if site in self._unsure or not self._is_even(window) else self._close(site, now)

    def due(self, now: float) -> list[Batch]:
        """Return what has waited long enough."""
        self._unsure = {site: since for site, since in self._unsure.items() if now - since < _UNSURE_FOR}
        due = [site for site, window in self._open.items() if min(self._ends(window)) <= now]
        return [batch for site in due for batch in self._close(site, now)]

    def next_due(self) -> float:
        """Return when :meth:`due` will next have something [s]; infinity while nothing waits."""
        return min((min(self._ends(window)) for window in self._open.values()), default=math.inf)

    def flush(self, now: float) -> list[Batch]:
        """Return all that is held back."""
        return [batch for site in list(self._open) for batch in self._close(site, now, to_the_end=True)]

    def _is_even(self, window: _Window) -> bool:
        return len(window) == self.world_size and len({len(lines) for lines in window.values()}) == 1

    def _ends(self, window: _Window) -> tuple[float, float]:
        """Return when a window has waited long enough, and when it has settled with equally many lines of all ranks."""
        last = max(lines[-1][0] for lines in window.values())
        settled = last + _SETTLES_AFTER if self._is_even(window) else math.inf
        return min(lines[0][0] for lines in window.values()) + self.timeout, settled

    def _close(self, site: tuple[Any, ...], now: float, *, to_the_end: bool = False) -> list[Batch]:
        window = self._open.pop(site)
        timed_out = self._ends(window)[0] <= now
        if self._is_even(window) and not timed_out:
            groups = [list(lines) for lines in zip(*window.values(), strict=True)]
        else:
            groups = _by_time(
                sorted((one for lines in window.values() for one in lines), key=lambda one: one[0])
            )
        complete = [len(group) == self.world_size for group in groups]
        if any(complete):
            self._unsure.pop(site, None)
        else:
            self._unsure[site] = now
        if len(groups) > 1 and not complete[-1] and not to_the_end:
            # The other ranks' lines of this call may be on their way.
            self._open[site] = {line.ranks[0]: [(arrived, line)] for arrived, line in groups.pop()}
        counts = Counter(line.ranks[0] for group in groups for _, line in group)
        left_out = {rank: max(counts.values()) - counts[rank] for rank in range(self.world_size)}
        batches = []
        for group in groups:
            lines = sorted((line for _, line in group), key=lambda line: line.ranks)
            there = {line.ranks[0] for line in lines}
            missing = tuple(rank for rank, number in left_out.items() if number and rank not in there)
            for rank in missing:
                left_out[rank] -= 1
            batches.append(Batch(site, lines, missing, now - group[0][0]))
        return batches


def _by_time(lines: Sequence[_Arrived]) -> list[list[_Arrived]]:
    """Divide lines, in the order of their arrival, at the largest gaps, so that no rank is twice in a group."""
    groups: list[list[_Arrived]] = [[]]
    for one in lines:
        group = groups[-1]
        before = [i for i, (_, line) in enumerate(group) if line.ranks == one[1].ranks]
        group.append(one)
        if before:
            gaps = [(later[0] - earlier[0], i) for i, (earlier, later) in enumerate(pairwise(group), 1)]
            _, cut = max(gaps[before[0] :])
            groups[-1:] = [group[:cut], group[cut:]]
    return groups


# -- The collector, to which all lines come --

# Longest time between two looks at what has waited long enough [s].
_LOOK_EVERY = 0.25


class Collector:
    """Prints the lines of all ranks in rank order; lives on rank 0."""

    # Lines of other ranks are taken and printed on the thread of the channel's handlers. The main thread only puts its
    # own aside, which whoever comes next takes along: a line of another rank, or the thread of this object.

    def __init__(
        self, channel: SideChannel, *, emit: Callable[[logging.LogRecord], None] | None = None
    ) -> None:
        self._emit = emit or (lambda record: logging.getLogger(record.name).handle(record))
        self._channel, self._host = channel, socket.gethostname()
        self.windows = Windows(channel.world_size)
        self._own: deque[tuple[str, LogCall, float]] = deque()
        self._lock = threading.RLock()  # a signal handler that prints may interrupt the thread that has it
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = False
        self._removes = [
            on_flush(self.flush),
            *[channel.on(topic, lambda post: self.take(*post)) for topic in (LINE, WARNING)],
        ]
        channel.at_close(self.close)
        with suppress(RuntimeError):  # Python is exiting, and prints what is held back at the end
            threading.Thread(target=self._run, name="lockstep-log-order", daemon=True).start()

    def add(self, topic: str, call: LogCall) -> None:
        """Take a line of rank 0; returns at once."""
        self._own.append((topic, call, time.monotonic()))
        # A line that can only wait wakes nobody. It was put aside before this look, so whoever opens a window after it
        # takes the line along.
        if self.windows:
            self._wake.put(None)

    def take(self, topic: str, rank: int, call: LogCall) -> None:
        """Take a line of another rank and print what is ready, on this thread."""
        with self._lock:
            self._take_own()
            self._add(topic, rank, call, time.monotonic())
            self._take_own()  # see `add`

    def settle(self, timeout: float) -> None:
        """Wait up to ``timeout`` [s] for lines that are under way, then print all that is held back."""
        deadline = time.monotonic() + timeout
        while (self._own or self.windows) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.flush()

    def flush(self) -> None:
        """Print all that is held back."""
        with self._lock:
            self._take_own()
            self._print(self.windows.flush(time.monotonic()))

    def close(self) -> None:
        """Print all that is held back and stop."""
        self.flush()
        for remove in self._removes:
            remove()
        self._ended = True
        self._wake.put(None)

    def _run(self) -> None:
        while not self._ended:
            with self._lock:
                self._take_own()
                self._print(self.windows.due(time.monotonic()))
                due = self.windows.next_due()
            with suppress(queue.Empty):
                self._wake.get(timeout=min(max(0.0, due - time.monotonic()), _LOOK_EVERY))

    def _take_own(self) -> None:
        while self._own:
            topic, call, now = self._own.popleft()
            self._add(topic, 0, with_real_path(call), now)

    def _add(self, topic: str, rank: int, call: LogCall, now: float) -> None:
        host = self._channel.process_of(rank)[0] if rank else self._host
        line = Line(*call, (rank,), (host,))
        # Equal warnings are one, wherever they are given.
        site = (topic, *line[:4]) if topic == LINE else (topic, *line[:2], line.text)
        self._print(self.windows.add(site, line, now))

    def _print(self, batches: list[Batch]) -> None:
        for site, lines, missing, waited in batches:
            is_warning = site[0] == WARNING
            if is_warning and lines[0].ranks[0] == 0:
                continue  # rank 0 has printed it at once
            for line in merge_equal(lines):
                self._print_record(record_of(line))
            if missing and not is_warning:
                text = f"{ranks_in_words(missing)} did not log this line within {waited:.1f} s"
                note = Line(
                    *lines[0][:4], text, time.time(), lines[0].function, "", {}, missing, ("",) * len(missing)
                )
                self._print_record(record_of(note, prefix=""))

    def _print_record(self, record: logging.LogRecord) -> None:
        outcome.lines_followed = True
        try:
            self._emit(record)
        except Exception:
            # A faulty handler must neither end the thread that prints nor keep the lines after this one.
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc(file=sys.stderr)
