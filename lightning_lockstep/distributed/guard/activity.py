"""Whether a process still moves: its threads, its connections, what it waits for."""

from __future__ import annotations

import os
import platform
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from lightning_lockstep._doors.torch_internals import backend_of, stores_of_groups
from lightning_lockstep.distributed.process_group import process_group_exists

# -- Connections between ranks, and how to end a wait on them --
# gloo cannot be told to give up: a rank waits in C++ until its peer answers, or the connection breaks. So
# the connections between two ranks are shut down, as they are when a process ends; then every wait for that
# peer raises.

# Where Linux's ``struct tcp_info`` says how many bytes the other end has acknowledged, and how many have come.
_BYTES_IN_TCP_INFO, _TCP_INFO_LENGTH = struct.Struct("@120xQQ"), 136

#: This end's address and port, and the other end's, as texts such as ``10.0.0.1:4000``.
Connection = tuple[str, str]


def connections(pid: int | None = None) -> dict[Connection, int]:
    """Return the TCP connections of a process of this host, by default this one, with their descriptors."""
    with suppress(psutil.Error):
        return {
            (_text(one.laddr), _text(one.raddr)): one.fd
            for one in psutil.Process(pid).net_connections("tcp")
            if one.status == psutil.CONN_ESTABLISHED
        }
    return {}


def transferred(
    without_ports: Collection[int] = (),  # connections with one of them at either end are left out
) -> dict[str, int]:
    """Return how many bytes each TCP connection here has sent and received, where Linux says so."""
    found = {}
    with suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError, ValueError, struct.error):
                name = str(link.readlink())
                if name.startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(link.name))) as one:
                        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_LENGTH)
                        ports = {one.getsockname()[1], one.getpeername()[1]}
                    if not ports & set(without_ports):
                        found[name] = sum(_BYTES_IN_TCP_INFO.unpack(info))
    return found


def end_connections(
    ends: Collection[Connection],
    *,
    hosts: Iterable[str] = (),  # connections with these are shut down too
    kept_ports: Collection[int] = (),  # but for those with one of them at either end
) -> int:
    """Shut down connections of this process, which its peers see end; return how many."""
    addresses, count = set(_addresses(hosts)), 0
    for end, number in connections().items():
        of_such_a_host = end[1].rpartition(":")[0] in addresses and not ports_of(end) & set(kept_ports)
        if end in ends or of_such_a_host:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def ports_of(end: Connection) -> set[int]:
    """Return the ports of both ends of a connection."""
    return {int(address.rpartition(":")[2]) for address in end}


def _addresses(hosts: Iterable[str]) -> Iterator[str]:
    for host in hosts:
        with suppress(OSError):
            yield socket.gethostbyname(host)


def abort_devices() -> None:
    """Abort what nccl does in any process group, which ends every wait for it, and the use of the group."""
    if not process_group_exists():
        return
    for group in stores_of_groups():
        if type(group) is dist.ProcessGroup:
            with suppress(RuntimeError):
                backend_of(group, torch.device("cuda")).abort()


def _text(address: Any) -> str:
    return f"{address.ip.removeprefix('::ffff:')}:{address.port}"


# -- What the threads of this process do, as Linux knows it; nothing is known elsewhere --

# Threads that work for this package, or for ZeroMQ under it: by their names in Python, and in C.
_OURS, _OURS_IN_C = "lockstep-", "ZMQbg"
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
# Calls of Linux that read from or write to the file that their first argument names, and those of them that write.
_CALLS = {
    "x86_64": (
        {0, 17, 19, 295, 74, 75, 326},  # read, pread64, readv, preadv, fsync, fdatasync, copy_file_range
        {1, 18, 20, 296, 40},  # write, pwrite64, writev, pwritev, sendfile
    ),
    "aarch64": ({63, 67, 65, 69, 82, 83, 285}, {64, 68, 66, 70, 71}),
}
_READS, _WRITES = _CALLS.get(platform.machine(), (set[int](), set[int]()))


class ThreadLook(NamedTuple):
    """What a thread has done so far, and what it is in the middle of."""

    seconds: float  # CPU time [s]
    bytes: float  # read and written by calls that have returned
    waits_for: str = ""  # ``file``: in a call on one, or for a disk; ``pipe``: it writes into one
    wakes: int = 0  # how often it has been woken; known where it writes into a pipe

    def goes_on_from(self, earlier: ThreadLook) -> bool:
        """Return whether the call that it waits in goes on: a reader of a pipe wakes the writer each time."""
        if self.waits_for != earlier.waits_for:
            return False
        return self.waits_for == "file" or (self.waits_for == "pipe" and self.wakes > earlier.wakes)


def look_at(thread: int) -> ThreadLook | None:
    """Return what a thread does; ``None``: it has ended, is this package's, or the system does not say."""
    try:
        name, _, rest = _read(thread, "stat").partition("(")[2].rpartition(")")
        state, *numbers = rest.split()
        seconds = (int(numbers[10]) + int(numbers[11])) / _TICKS
    except (OSError, ValueError, IndexError):
        return None
    if name.startswith(_OURS_IN_C):
        return None
    return ThreadLook(seconds, _bytes(thread), *_waits_for(thread, state))


def other_threads(than: int | None) -> Iterator[tuple[int, ThreadLook]]:
    """Return the threads of this process but one and those that work for this package, with their numbers."""
    ours = {one.native_id for one in threading.enumerate() if one.name.startswith(_OURS)}
    with suppress(OSError):
        for folder in Path("/proc/self/task").iterdir():
            thread = int(folder.name)
            if thread != than and thread not in ours and (look := look_at(thread)) is not None:
                yield thread, look


def _bytes(thread: int) -> float:
    with suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(": ") for line in _read(thread, "io").splitlines())
        return float(fields["rchar"]) + float(fields["wchar"])
    return 0.0


def _waits_for(thread: int, state: str) -> tuple[str, int]:
    if state == "D":
        return "file", 0
    if state != "S":
        return "", 0
    with suppress(OSError, ValueError):
        number, first, *_ = _read(thread, "syscall").split()
        if int(number) not in _READS | _WRITES:
            return "", 0
        # What the link says comes from the kernel alone: a file that hangs is not asked.
        target = str(Path(f"/proc/self/fd/{int(first, 16)}").readlink())
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            return "file", 0
        if target.startswith("pipe:") and int(number) in _WRITES:
            return "pipe", _wakes(thread)
    return "", 0


def _wakes(thread: int) -> int:
    (line,) = (one for one in _read(thread, "status").splitlines() if one.startswith("voluntary_ctxt"))
    return int(line.rpartition(":")[2])


def _read(thread: int, name: str) -> str:
    return Path(f"/proc/self/task/{thread}/{name}").read_text(encoding="utf-8", errors="replace")


# -- Whether the program of this process moves, seen from another thread --

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
