"""Observes the processes of ranks: what this rank does, whether it moves, and why another rank does not answer."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psutil

from lightning_lockstep.distributed.failure.interrupt import deals_with_errors
from lightning_lockstep.distributed.failure.record import own_place
from lightning_lockstep.distributed.guard.rank_state import (
    CallRecorder,
    GatherRecorder,
    Outstanding,
    Position,
    RankState,
    UnresponsiveRank,
    group_recorders,
    group_titles,
    position,
)
from lightning_lockstep.distributed.side_channel.channel import SideChannel

# -- Whether a process moves --
# The guard waits for a rank that moves, which is one that computes or transfers data in any of its threads, in a child
# process or in the system on their behalf. A thread that sleeps, or polls something now and then, does not move.

# How the names of this package's threads begin; they do not count.
_OURS = "lockstep-"
# A process moves if it uses this share of one core, or reads and writes this much [bytes/s].
_BUSY_SHARE, _IO_RATE = 0.05, 100_000.0


class _Sample(NamedTuple):
    time: float
    seconds: Mapping[int, float]  # CPU time, by thread or child process [s]
    bytes: Mapping[int, float]  # read and written, by process
    waits: bool  # whether a thread waits for a disk


class Activity:
    """Tells whether a process and its children compute, read, write or wait for a disk, in any thread."""

    def __init__(
        self,
        window: float,  # how far back it looks [s]
        is_rank: Callable[[int], bool],  # child processes that are ranks of the run do not count
        pid: int | None = None,  # by default this process
    ) -> None:
        self._window, self._is_rank = window, is_rank
        self._process = psutil.Process(pid)
        self._left_out = 0.0  # by left_out() [bytes]
        self._samples: deque[_Sample] = deque()

    def look(self) -> None:
        """Take a sample, which takes milliseconds; the difference between two samples counts."""
        now = time.monotonic()
        while self._samples and self._samples[0].time < now - self._window:
            self._samples.popleft()
        with suppress(psutil.Error):
            counted = {self._process.pid: _bytes(self._process) - self._left_out}
            ours = {one.native_id for one in threading.enumerate() if one.name.startswith(_OURS)}
            threads = [one for one in self._process.threads() if one.id not in ours]
            spent = {one.id: one.user_time + one.system_time for one in threads}
            waits = any(_waits_for_disk(one.id) for one in threads)
            spent[0] = sum(self._process.cpu_times()[2:4])  # of child processes that have ended
            for child in self._children():
                with suppress(psutil.Error):
                    spent[child.pid] = sum(child.cpu_times()[:4])  # with its own children that have ended
                    counted[child.pid] = _bytes(child)
            self._samples.append(_Sample(now, spent, counted, waits))

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Do not count what this process reads and writes in the body, which is mostly /proc."""
        before = _bytes(self._process)
        try:
            yield
        finally:
            self._left_out += _bytes(self._process) - before

    def forget(self) -> None:
        """Forget the samples, so that the time before now does not count."""
        self._samples.clear()

    @property
    def moves(self) -> bool:
        """Whether the process has moved in the window; also true if there are too few samples to tell."""
        if len(self._samples) < 2:
            return True
        first, last = self._samples[0], self._samples[-1]
        passed = max(last.time - first.time, 1e-3)
        is_busy = _growth(first.seconds, last.seconds) > _BUSY_SHARE * passed
        return last.waits or is_busy or _growth(first.bytes, last.bytes) > _IO_RATE * passed

    def _children(self) -> Iterator[psutil.Process]:
        ranks: set[int] = set()  # child processes that are ranks, and what those have started
        for child in self._process.children(recursive=True):
            with suppress(psutil.Error):  # it has ended meanwhile
                if self._is_rank(child.pid) or child.ppid() in ranks:
                    ranks.add(child.pid)
                else:
                    yield child


def _growth(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    return sum(max(value - before.get(key, 0.0), 0.0) for key, value in after.items())


def _waits_for_disk(thread: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(thread).status() == psutil.STATUS_DISK_SLEEP)
    return False


def _bytes(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        _, _, *counters = process.io_counters()  # numbers of calls, then bytes
        return float(sum(counters))
    return 0.0


def _is_in_socket() -> bool:
    """Return whether a thread is in a call of Python's sockets: it may be transferring data, so count it as moving."""
    ours = {one.ident for one in threading.enumerate() if one.name.startswith(_OURS)}
    return any(
        # A thread that accepts connections, such as multiprocessing's, may wait forever.
        frame.f_globals.get("__name__") in ("socket", "ssl") and frame.f_code.co_name != "accept"
        for ident, frame in sys._current_frames().items()
        if ident not in ours
    )


# -- What a rank reports about itself, and what is known about a rank that does not answer --

# How many calls of each rank are compared.
_COMPARED = 100
# The time within which a movement counts for the process of a rank that does not answer [s].
_WINDOW = 10.0


class RankObserver:
    """Observes what this rank does; only the guard's thread calls its methods."""

    def __init__(
        self,
        channel: SideChannel,
        recorder: CallRecorder,
        *,
        window: float,  # the time within which a movement counts [s]
    ) -> None:
        self._channel, self._recorder = channel, recorder
        self.activity = Activity(window, _is_rank_of(channel))
        self._gathers = GatherRecorder(channel)
        self.trains = threading.current_thread()
        self.raised_at: Position | None = None  # where a collective has raised the error that it deals with

    def outstanding(self) -> tuple[Outstanding, ...]:
        return tuple(one for recorder in self._recorders() for one in recorder.outstanding())

    def _recorders(self) -> list[CallRecorder]:
        return [self._recorder, *group_recorders(), self._gathers]

    def state(self, sites: bool = False) -> RankState:
        """Return where this rank is, with call sites if ``sites``; the first time torch loads its compiler for them."""
        with self.activity.left_out():
            self.activity.look()
            calls = [call for recorder in self._recorders() for call in recorder.calls(sites=sites)]
            calls.sort(key=lambda one: one.started)
            if not deals_with_errors(sys._current_frames().get(self.trains.ident or 0)):
                self.raised_at = None  # the program has caught the error, and goes on
            return RankState(
                rank=self._channel.rank,
                groups=dict(group_titles().values()) | self._gathers.groups(),
                outstanding=self.outstanding(),
                calls=tuple(calls[-_COMPARED:]),
                seconds_since_call=time.time() - calls[-1].started if calls else None,
                position=self.raised_at or position(self.trains),
                where=own_place(),
                raised=self.raised_at is not None,
                moves=self.activity.moves or _is_in_socket(),
            )


def probe_unresponsive(
    channel: SideChannel,
    rank: int,
    activities: dict[int, Activity],  # what earlier calls in the same look have seen
) -> UnresponsiveRank:
    """Return what is known about a rank that does not answer; call this now and then while it does not."""
    host, pid = channel.process_of(rank)
    if channel.has_closed(rank):
        # It has not failed: a rank that fails reports that first, and a failure ends the look.
        return UnresponsiveRank("its program has ended", has_left=True)
    if host != socket.gethostname() or not pid:
        place = f" (process {pid} on host {host})" if pid else ""
        if channel.answers(rank):
            return UnresponsiveRank(f"it runs but does not answer{place}", is_moving=True)
        return UnresponsiveRank(f"it is stopped, has ended or cannot be reached{place}")
    try:
        status = psutil.Process(pid).status()
        if rank not in activities:
            activities[rank] = Activity(_WINDOW, _is_rank_of(channel), pid)
        activities[rank].look()
    except psutil.NoSuchProcess:
        status = psutil.STATUS_DEAD
    except psutil.AccessDenied:  # /proc hides the processes of other users
        return UnresponsiveRank(f"its process {pid} does not answer")
    if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
        return UnresponsiveRank(f"its process {pid} has ended", has_ended=True)
    if status == psutil.STATUS_STOPPED:
        return UnresponsiveRank(f"its process {pid} is stopped, by a signal or a debugger", is_stopped=True)
    if activities[rank].moves:
        return UnresponsiveRank(f"its process {pid} computes", is_moving=True)
    return UnresponsiveRank(f"its process {pid} does not answer")


def _is_rank_of(channel: SideChannel) -> Callable[[int], bool]:
    """Return a function that tells whether a process of this host is a rank, as far as this rank knows."""
    return lambda pid: pid in {channel.process_of(rank)[1] for rank in range(channel.world_size)}
