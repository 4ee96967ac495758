"""Whether a process moves, as psutil tells; what is known of a rank that does not answer; how waits are ended."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from lightning_lockstep.distributed.process_group import process_group_exists
from lightning_lockstep.distributed.side_channel.channel import SideChannel

# -- Whether a process moves --
# A rank that moves is waited for. What it waits for may be done by another of its threads, by child processes or by
# the system; a thread that sleeps, or polls something now and then, does not move.

#: Threads that work for this package, by their names; they do not count.
OURS = "lockstep-"
# What counts as moving: so much of one core, or so much read and written [bytes/s].
_BUSY_SHARE, _IO_RATE = 0.05, 100_000.0
_COUNTERS = ("read_chars", "write_chars", "read_bytes", "write_bytes")


class _Reads:
    """What this process has read for this package, of /proc most of all, which is no movement of the program."""

    def __init__(self) -> None:
        self.total = 0.0  # [bytes]

    @contextmanager
    def of_this_package(self) -> Iterator[None]:
        """Take what is read and written meanwhile for that."""
        before = _bytes(psutil.Process())
        try:
            yield
        finally:
            self.total += _bytes(psutil.Process()) - before


_reads = _Reads()


class _Sample(NamedTuple):
    time: float
    seconds: Mapping[int, float]  # CPU time, by thread or child process [s]
    bytes: Mapping[int, float]  # read and written, by process
    waits: bool  # for a disk


class Activity:
    """Tells whether a process and its children compute, read, write or wait for a disk, on whatever thread."""

    def __init__(
        self,
        window: float,  # how far back it looks [s]
        is_rank: Callable[[int], bool],  # a child process that is a rank of the run moves for itself
        pid: int | None = None,  # by default this process
    ) -> None:
        self._window, self._is_rank = window, is_rank
        self._process = psutil.Process(pid)
        self._is_own = self._process.pid == os.getpid()
        self._samples: deque[_Sample] = deque()

    def look(self, *, loads: bool = False) -> None:
        """Take a sample, which takes milliseconds; what happens between two of them counts."""
        # ``loads``: a thread of ours has read files since the last one: what was read and written then is left out.
        now, pid = time.monotonic(), self._process.pid
        if loads and self._samples:
            _reads.total = _bytes(self._process) - self._samples[-1].bytes[pid]
        while self._samples and self._samples[0].time < now - self._window:
            self._samples.popleft()
        with suppress(psutil.Error), _reads.of_this_package():
            counted = {pid: _bytes(self._process) - (_reads.total if self._is_own else 0.0)}
            spent = self._spent_by_threads()
            waits = any(map(_waits_for_disk, spent))
            spent[0] = sum(self._process.cpu_times()[2:4])  # of child processes that have ended
            for child in self._children():
                with suppress(psutil.Error):
                    spent[child.pid] = sum(child.cpu_times()[:4])  # with its own children that have ended
                    counted[child.pid] = _bytes(child)
            self._samples.append(_Sample(now, spent, counted, waits))

    def forget(self) -> None:
        """Forget the samples, so that the time before now does not count."""
        self._samples.clear()

    @property
    def moves(self) -> bool:
        """Whether the process has moved in the window, or it is not known whether it has."""
        if len(self._samples) < 2:
            return True
        first, last = self._samples[0], self._samples[-1]
        passed = max(last.time - first.time, 1e-3)
        is_busy = _growth(first.seconds, last.seconds) > _BUSY_SHARE * passed
        return last.waits or is_busy or _growth(first.bytes, last.bytes) > _IO_RATE * passed

    def _spent_by_threads(self) -> dict[int, float]:
        """Return the CPU time of each thread that is not ours [s]."""
        if not psutil.LINUX:  # there the numbers of threads mean nothing
            times = self._process.cpu_times()
            return {self._process.pid: times.user + times.system}
        ours = {one.native_id for one in threading.enumerate() if one.name.startswith(OURS)}
        return {
            one.id: one.user_time + one.system_time for one in self._process.threads() if one.id not in ours
        }

    def _children(self) -> Iterator[psutil.Process]:
        ranks: set[int] = set()  # and what they have started
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
    with suppress(psutil.Error, AttributeError):  # macOS does not say
        counters = process.io_counters()
        return float(sum(getattr(counters, name, 0) for name in _COUNTERS))
    return 0.0


# -- What is known of a rank that does not answer --

# How far back it counts that its process computes [s].
_WINDOW = 10.0


class UnresponsiveRank(NamedTuple):
    """What is known of a rank that does not answer."""

    reason: str
    host: str = ""  # empty: not known
    has_ended: bool = False  # its process
    has_left: bool = False  # its program has come to its end, without an error
    is_stopped: bool = False  # its process
    # Its process runs, though no thread of Python's can answer: as while C computes and keeps Python's lock.
    is_moving: bool = False
    connections: tuple[Connection, ...] = ()  # as far as this rank can see them


def probe_unresponsive(
    channel: SideChannel,
    rank: int,
    activities: dict[int, Activity],  # what earlier calls for the same wait have seen
    *,
    has_failed: bool,  # if it has left, it or another rank is known to have failed
) -> UnresponsiveRank:
    """Return what is known of a rank that does not answer; to be called now and then while it does not."""
    host, pid = channel.process_of(rank)
    if channel.has_closed(rank):
        said = "it has come to the end of its program"
        return UnresponsiveRank(said, host, has_ended=has_failed, has_left=not has_failed)
    if host != socket.gethostname() or not pid:
        place = f" (process {pid} on host {host})" if pid else ""
        if channel.answers(rank):
            return UnresponsiveRank(f"it runs, and does not answer{place}", host, is_moving=True)
        return UnresponsiveRank(f"it is stopped, has ended or cannot be reached{place}", host)
    try:
        status = psutil.Process(pid).status()
        if rank not in activities:
            activities[rank] = Activity(_WINDOW, is_rank_of(channel), pid)
        activities[rank].look()
    except psutil.NoSuchProcess:
        status = psutil.STATUS_DEAD
    if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
        return UnresponsiveRank(f"its process {pid} has ended", host, has_ended=True)
    there = tuple(connections(pid))
    if status == psutil.STATUS_STOPPED:
        what = f"its process {pid} is stopped, by a signal or a debugger"
        return UnresponsiveRank(what, host, is_stopped=True, connections=there)
    if activities[rank].moves:
        return UnresponsiveRank(f"its process {pid} computes", host, is_moving=True, connections=there)
    return UnresponsiveRank(f"its process {pid} does not answer", host, connections=there)


def is_rank_of(channel: SideChannel) -> Callable[[int], bool]:
    """Return a function that tells whether a process of this host is a rank, as far as this one knows."""
    return lambda pid: pid in {channel.process_of(rank)[1] for rank in range(channel.world_size)}


# -- Connections between ranks, and how to end a wait on them --
# gloo cannot be told to give up: a rank waits in C++ until its peer answers, or the connection breaks. So the
# connections between two ranks are shut down, as they are when a process ends; then every wait for that peer raises.

#: This end's address and port, and the other end's, as texts such as ``10.0.0.1:4000``.
Connection = tuple[str, str]


def connections(pid: int | None = None) -> dict[Connection, int]:
    """Return the TCP connections of a process of this host, by default this one, with their descriptors."""
    with suppress(psutil.Error), _reads.of_this_package():
        return {
            (_text(one.laddr), _text(one.raddr)): one.fd
            for one in psutil.Process(pid).net_connections("tcp")
            if one.status == psutil.CONN_ESTABLISHED
        }
    return {}


def end_connections(ends: Collection[Connection]) -> int:
    """Shut down connections of this process, which its peers see end; return how many."""
    count = 0
    for end, number in connections().items():
        if end in ends:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def connections_between_ranks(
    ends: Mapping[int, Collection[Connection]],  # of each rank whose connections are known
    hosts: Collection[str],  # of other ranks
    kept_ports: Collection[int],  # connections with one of them at either end are not the backend's
) -> dict[int, list[Connection]]:
    """Return which connections of each rank are to be ended, so that no rank waits for another one."""
    owner = {end: rank for rank, theirs in ends.items() for end in theirs}
    addresses = set[str]()
    for host in hosts:
        with suppress(OSError):
            addresses.add(socket.gethostbyname(host))

    def is_meant(rank: int, here: str, there: str) -> bool:
        other = owner.get((there, here), rank)
        return (other != rank or _host(there) in addresses) and not ports_of((here, there)) & set(kept_ports)

    return {rank: sorted(end for end in theirs if is_meant(rank, *end)) for rank, theirs in ends.items()}


def ports_of(end: Connection) -> set[int]:
    """Return the ports of both ends of a connection."""
    return {int(address.rpartition(":")[2]) for address in end}


def abort_devices() -> None:
    """Abort what nccl does in any process group, which ends every wait for it, and the use of the group."""
    if not process_group_exists():
        return
    # Torch has no public list of the process groups. A copy: the main thread may be making one.
    for group in list(dist.distributed_c10d._world.pg_map):
        if type(group) is dist.ProcessGroup:
            with suppress(RuntimeError):
                backend: Any = group._get_backend(torch.device("cuda"))
                backend.abort()


def _text(address: Any) -> str:
    return f"{address.ip.removeprefix('::ffff:')}:{address.port}"


def _host(address: str) -> str:
    return address.rpartition(":")[0]
