"""Rank 0's side of logging: collects the lines of all ranks for each call site and prints them in rank order.

Lines of one call site wait in a window for those of the other ranks. The window is printed once every rank has logged
the same number of lines in it, at the latest when its first line has waited for ``order_timeout``. Then its lines are
grouped by the time of their arrival, so that a line that one rank has not logged does not shift the lines after it.
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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed import SideChannel
from lightning_lockstep.distributed.failure.process_exit import exit_plan, on_flush

# -- A log line on its way between ranks --

#: (logger, level, path, line, text, created, function, trace, extra): the first fields of :class:`Line`.
LogCall = tuple[str, int, str, int, str, float, str, str, Mapping[str, Any]]
# Topics: a line that a rank has logged in order; a warning, which is printed once for all ranks.
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
    ranks: tuple[int, ...]  # that logged it, in rising order
    hosts: tuple[str, ...]  # of these ranks, in the same order


def record_of(line: Line, *, prefix: str | None = None) -> logging.LogRecord:
    """Return the record that prints ``line``; the default prefix, which our formats remove, names its ranks."""
    ranks = f"[{ranks_in_words(line.ranks)}] "
    text = (ranks if prefix is None else prefix) + line.text
    record = logging.LogRecord(line.logger, line.level, line.path, line.number, text, (), None, line.function)
    own = {
        "created": line.created,
        "msecs": line.created % 1 * 1000.0,
        "exc_text": line.trace or None,
        "lockstep_prefix": ranks if prefix is None else "",
        "lockstep_ranks": line.ranks,
        "lockstep_hosts": line.hosts,
        "lockstep_collected": True,
    }
    vars(record).update({**line.extra, **vars(record), **own})
    return record


_real_path = lru_cache(maxsize=1000)(os.path.realpath)


def with_real_path(call: LogCall) -> LogCall:
    """Return the call with the real path, because a rank may have a relative path and another one a link."""
    return *call[:2], _real_path(call[2]), *call[3:]


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


# -- When which lines are printed, decided without threads or clocks --

# If a rank is missing in the whole of a window, its line may come after the window was printed, and begin the next one.
# For the next minute a window with equally many lines of all ranks is therefore printed only 0.2 s after its last line.
_UNSURE_FOR, _SETTLES_AFTER = 60.0, 0.2

_Arrived = tuple[float, Line]


class ReadyLines(NamedTuple):
    """Lines of one call of a logger, ready to be printed."""

    site: tuple[Any, ...]
    lines: list[Line]  # of different ranks, in rising order
    missing: tuple[int, ...]  # ranks that have not logged it
    waited: float  # how long the first line was held back [s]


class Windows:
    """Lines of each call site that wait for those of other ranks."""

    def __init__(self, world_size: int, *, timeout: float = 5.0) -> None:
        self.world_size = world_size
        self.timeout = timeout  # longest time that a line waits for those of other ranks [s]
        self._open: dict[tuple[Any, ...], list[_Arrived]] = {}  # in the order of arrival
        self._unsure: dict[tuple[Any, ...], float] = {}  # since when [s]

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, site: tuple[Any, ...], line: Line, now: float) -> list[ReadyLines]:
        """Take a line, at ``now`` [s] of a clock that never goes back, and return what can be printed."""
        window = self._open.setdefault(site, [])
        window.append((now, line))
        return [] if site in self._unsure or not self._is_even(window) else self._close(site, now)

    def due(self, now: float) -> list[ReadyLines]:
        """Return the lines that have waited long enough."""
        self._unsure = {site: since for site, since in self._unsure.items() if now - since < _UNSURE_FOR}
        due = [site for site, window in self._open.items() if min(self._deadlines(window)) <= now]
        return [ready for site in due for ready in self._close(site, now)]

    def next_due(self) -> float:
        """Return when :meth:`due` will next return something [s]; infinity if nothing waits."""
        return min((min(self._deadlines(window)) for window in self._open.values()), default=math.inf)

    def flush(self, now: float) -> list[ReadyLines]:
        return [ready for site in list(self._open) for ready in self._close(site, now, to_the_end=True)]

    def _is_even(self, window: list[_Arrived]) -> bool:
        """Return whether a window has equally many lines of all ranks."""
        if len(window) % self.world_size:
            return False
        counts = Counter(line.ranks for _, line in window)
        return len(counts) == self.world_size and len({*counts.values()}) == 1

    def _deadlines(self, window: list[_Arrived]) -> tuple[float, float]:
        """Return when a window has waited too long, and when it settles with equally many lines of all ranks."""
        settled = window[-1][0] + _SETTLES_AFTER if self._is_even(window) else math.inf
        return window[0][0] + self.timeout, settled

    def _close(self, site: tuple[Any, ...], now: float, *, to_the_end: bool = False) -> list[ReadyLines]:
        """Take the lines of a call site, divided into calls."""
        window = self._open.pop(site)
        if self._is_even(window) and now < self._deadlines(window)[0]:
            each = len(window) // self.world_size
            of_ranks = sorted(window, key=lambda one: one[1].ranks)  # those of a rank stay in their order
            calls = [of_ranks[number::each] for number in range(each)]
        else:
            calls = _by_time(window)
        is_complete = [len(call) == self.world_size for call in calls]
        if any(is_complete):
            self._unsure.pop(site, None)
        else:
            self._unsure[site] = now
        if len(calls) > 1 and not is_complete[-1] and not to_the_end:
            self._open[site] = calls.pop()  # the lines of other ranks for the last call may still come
        return [self._ready(site, call, now) for call in calls]

    def _ready(self, site: tuple[Any, ...], call: list[_Arrived], now: float) -> ReadyLines:
        lines = sorted((line for _, line in call), key=lambda line: line.ranks)
        logged = {line.ranks[0] for line in lines}
        missing = tuple(rank for rank in range(self.world_size) if rank not in logged)
        return ReadyLines(site, lines, missing, now - min(arrived for arrived, _ in call))


def _by_time(window: list[_Arrived]) -> list[list[_Arrived]]:
    """Divide the lines of a window at the largest gaps between arrivals so that no call has a rank twice."""
    calls: list[list[_Arrived]] = [[]]
    for one in window:
        call = calls[-1]
        before = [i for i, (_, line) in enumerate(call) if line.ranks == one[1].ranks]
        call.append(one)
        if before:
            gaps = [(later[0] - earlier[0], i) for i, (earlier, later) in enumerate(pairwise(call), 1)]
            _, cut = max(gaps[before[0] :])
            calls[-1:] = [call[:cut], call[cut:]]
    return calls


# -- The collector, to which all lines come --

# Longest time between two checks for lines that have waited long enough [s].
_LOOK_EVERY = 0.25


class Collector:
    """Prints the lines of all ranks in rank order; lives on rank 0."""

    # Lines are queued, and the thread of this object prints them: neither the caller nor the channel waits for that.

    def __init__(self, channel: SideChannel, *, emit: Callable[[logging.LogRecord], None] | None = None) -> None:
        self._emit = emit or (lambda record: logging.getLogger(record.name).handle(record))
        self._channel, self._host = channel, socket.gethostname()
        self.windows = Windows(channel.world_size)
        self._queued: deque[tuple[str, int, LogCall, float]] = deque()
        self._lock = threading.RLock()  # a signal handler that prints may interrupt the thread that holds it
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = False
        self._removes = [
            on_flush(self.flush),
            *[channel.on(topic, lambda post: self.take(*post)) for topic in (LINE, WARNING)],
        ]
        channel.at_close(self.close)
        with suppress(RuntimeError):  # raised if Python is exiting; lines that wait are printed at the end
            threading.Thread(target=self._run, name="lockstep-log-order", daemon=True).start()

    def take(self, topic: str, rank: int, call: LogCall) -> None:
        """Take a line of a rank; returns at once."""
        self._queued.append((topic, rank, call, time.monotonic()))
        # If no window is open, a line of rank 0 can only wait, and no thread is woken. The line that opens one
        # later takes this one along, because it was queued before the check here.
        if rank or self.windows:
            self._wake.put(None)

    def settle(self, timeout: float) -> None:
        """Wait up to ``timeout`` [s] for lines on their way, then print all that wait."""
        deadline = time.monotonic() + timeout
        while (self._queued or self.windows) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.flush()

    def flush(self) -> None:
        with self._lock:
            self._take_queued()
            self._print(self.windows.flush(time.monotonic()))

    def close(self) -> None:
        self.flush()
        for remove in self._removes:
            remove()
        self._ended = True
        self._wake.put(None)

    def _run(self) -> None:
        while not self._ended:
            with self._lock:
                self._take_queued()
                self._print(self.windows.due(time.monotonic()))
                due = self.windows.next_due()
            with suppress(queue.Empty):
                self._wake.get(timeout=min(max(0.0, due - time.monotonic()), _LOOK_EVERY))

    def _take_queued(self) -> None:
        while self._queued:
            topic, rank, call, now = self._queued.popleft()
            host = self._channel.process_of(rank)[0] if rank else self._host
            line = Line(*(call if rank else with_real_path(call)), (rank,), (host,))
            # Warnings with the same text are printed once, even if they come from different lines.
            site = (topic, *line[:4]) if topic == LINE else (topic, *line[:2], line.text)
            self._print(self.windows.add(site, line, now))

    def _print(self, ready: list[ReadyLines]) -> None:
        for site, lines, missing, waited in ready:
            is_warning = site[0] == WARNING
            if is_warning and lines[0].ranks[0] == 0:
                continue  # rank 0 has printed it at once
            for line in merge_equal(lines):
                self._print_record(record_of(line))
            if missing and not is_warning:
                text = f"{ranks_in_words(missing)} did not log this line within {waited:.1f} s"
                hosts = ("",) * len(missing)
                note = lines[0]._replace(text=text, created=time.time(), trace="", extra={}, ranks=missing, hosts=hosts)
                self._print_record(record_of(note, prefix=""))

    def _print_record(self, record: logging.LogRecord) -> None:
        exit_plan.lines_followed = True
        try:
            self._emit(record)
        except Exception:
            # A faulty handler must not end the thread that prints, nor prevent the next lines.
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc(file=sys.stderr)
