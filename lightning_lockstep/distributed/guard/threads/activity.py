"""Whether the program of this process moves, seen from another thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import psutil

from lightning_lockstep.distributed.guard.ending.connections import transferred
from lightning_lockstep.distributed.guard.threads.thread_states import ThreadLook, look_at, other_threads

__all__ = ["Activity"]

# What counts as moving: so much of one core, by the thread that trains, by the other threads, or by child processes ...
_BUSY_SHARE = 0.05
# ... or so much read, written, sent or received [bytes/s].
_IO_RATE = 100_000.0


class _Growth:
    """Adds up by how much counters have grown, some of which come and go."""

    def __init__(self) -> None:
        self.total = 0.0
        self._last: Mapping[Hashable, float] | None = None

    def take(self, values: Mapping[Hashable, float]) -> None:
        """Take the counters as they are now; what they had counted at the first look is left out."""
        if self._last is not None:
            last = self._last
            self.total += sum(max(value - last.get(key, 0.0), 0.0) for key, value in values.items())
        self._last = values


class _Sample(NamedTuple):
    """Sums of what moves, each as a multiple of the rate that counts; they only grow."""

    time: float
    program: tuple[float, ...]
    transferred: float


class Activity:
    """Tells whether the program moves: whether it computes, reads, writes, sends or receives, on whatever thread.

    What it waits for may be done by another of its threads, by child processes, or by the system in one long call. A
    thread that sleeps, or polls something now and then, does not move; neither do the threads of this package count.
    """

    def __init__(
        self,
        window: float,  # how far back it looks [s]
        is_rank: Callable[[int], bool],  # a child process that is a rank of the run moves for itself
        *,
        ports: Collection[int] = (),  # of this process: bytes of such connections do not count
    ) -> None:
        self._window, self._is_rank, self._ports = window, is_rank, frozenset(ports)
        self._samples: deque[_Sample] = deque()
        self._thread = threading.current_thread()
        self._own, self._others = _Threads(), _Threads()
        self._children, self._transferred = _Growth(), _Growth()
        self._cpu, self._held_up = 0.0, 0.0

    def follow(self, thread: threading.Thread) -> None:
        """Say which thread trains; by default it is the one that has made this object."""
        if thread is not self._thread:
            self._thread, self._own = thread, _Threads()
            self.forget()

    def look(
        self,
        *,
        closely: bool,  # also at other threads, child processes and connections: takes milliseconds
        held_up: bool = False,  # the thread that trains waits for one of ours: counts as if it had moved
    ) -> None:
        """Take a sample; to be called a few times in each window, from one thread."""
        now = time.monotonic()
        if held_up and self._samples:
            self._held_up += now - self._samples[-1].time
        while len(self._samples) > 1 and self._samples[1].time < now - self._window:
            self._samples.popleft()
        number = self._thread.native_id
        look = look_at(number) if number is not None and self._thread.is_alive() else None
        self._own.take([] if look is None else [(number or 0, look)], now)
        if closely:
            self._others.take(other_threads(number), now)
            self._children.take(self._children_seconds())
            self._transferred.take({key: float(count) for key, count in transferred(self._ports).items()})
        seconds = (
            self._cpu_seconds() + self._own.waited + self._held_up,
            self._others.seconds.total + self._others.waited,
            self._children.total,
        )
        counted = (self._own.bytes.total, self._others.bytes.total)
        self._samples.append(
            _Sample(
                now,
                (*(one / _BUSY_SHARE for one in seconds), *(one / _IO_RATE for one in counted)),
                self._transferred.total / _IO_RATE,
            )
        )

    def forget(self) -> None:
        """Forget the samples, so that the time before now does not count."""
        self._samples.clear()

    @property
    def moves(self) -> bool:
        """Whether the program has moved in the window."""
        if len(self._samples) < 2:
            return False
        first, last = self._samples[0], self._samples[-1]
        seconds = max(last.time - first.time, 1e-3)
        grown = (after - before for before, after in zip(first.program, last.program, strict=True))
        return self.transfers or any(one / seconds > 1.0 for one in grown)

    @property
    def transfers(self) -> bool:
        """Whether bytes have moved on the TCP connections of this process in the window."""
        if len(self._samples) < 2:
            return False
        first, last = self._samples[0], self._samples[-1]
        return (last.transferred - first.transferred) / max(last.time - first.time, 1e-3) > 1.0

    def _cpu_seconds(self) -> float:
        if self._thread.is_alive():
            try:
                clock = time.pthread_getcpuclockid(self._thread.ident or 0)
            except (OSError, AttributeError):
                return time.process_time()
            self._cpu = time.clock_gettime(clock)
        return self._cpu

    def _children_seconds(self) -> dict[Hashable, float]:
        found: dict[Hashable, float] = {}
        with suppress(psutil.Error):
            waiting = psutil.Process().children()
            while waiting:
                child = waiting.pop()
                with suppress(psutil.Error):
                    if not self._is_rank(child.pid):
                        spent = child.cpu_times()
                        found[child.pid] = spent.user + spent.system
                        waiting += child.children()
        return found


class _Threads:
    """What threads have done since the first look at them."""

    def __init__(self) -> None:
        # CPU time [s]; read and written [bytes]; waited in calls that go on [s].
        self.seconds, self.bytes, self.waited = _Growth(), _Growth(), 0.0
        self._looks: dict[int, ThreadLook] = {}
        self._looked = 0.0

    def take(self, threads: Iterable[tuple[int, ThreadLook]], now: float) -> None:
        looks = dict(threads)
        self.seconds.take({key: look.seconds for key, look in looks.items()})
        self.bytes.take({key: look.bytes for key, look in looks.items()})
        former = self._looks
        if any(key in former and look.goes_on_from(former[key]) for key, look in looks.items()):
            self.waited += now - self._looked
        self._looks, self._looked = looks, now
