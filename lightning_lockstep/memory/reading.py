"""How much memory a trial used at its peak, and how much there is.

On CUDA the caching allocator knows. On CPU it is the kernel: what is counted is what the limit that binds
counts, so that a prediction meets the wall where it stands.
"""

from __future__ import annotations

import re
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_lockstep.errors import ConfigurationError

__all__ = ["CPUMeter", "CUDAMeter", "MemoryMeter", "MemoryReading", "meter_for", "parse_bytes"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str | int | float) -> int:
    """Return a number of bytes.

    Args:
        text: A number of bytes, or text such as ``"4GiB"``, ``"500 MB"``.

    Raises:
        ConfigurationError: It is neither, or not above zero.

    Ranks: any rank, alone.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool) and text > 0:
        return int(text)
    found = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]i?)?b?\s*", str(text).lower())
    with suppress(ValueError):
        size = float(found.group(1)) * {**_UNITS, **_BINARY_UNITS}[found.group(2) or ""] if found else 0.0
        if size > 0:
            return int(size)
    raise ConfigurationError(
        f"memory_limit={text!r} is not an amount of memory. Give a number of bytes, or text such as '4GiB'."
    )


@dataclass(frozen=True)
class MemoryReading:
    """Peak and limit of one trial [bytes].

    Attributes:
        peak: Most that was in use at once.
        limit: Most that can be in use.
    """

    peak: float
    limit: float


class MemoryMeter(ABC):
    """Reads the memory of one process on one device.

    Attributes:
        source: Where the limit comes from, for people.
        noise: Difference between two peaks below which it says nothing [bytes].
    """

    source: str = ""
    noise: float = 0.0

    @abstractmethod
    def start(self) -> None:
        """Begin to watch for the peak.

        Ranks: any rank, alone.
        """

    @abstractmethod
    def stop(self) -> MemoryReading:
        """Return the peak since :meth:`start`, and the limit.

        Ranks: any rank, alone.
        """

    @property
    @abstractmethod
    def headroom(self) -> float:
        """What can still be taken now [bytes]."""


def meter_for(
    device: torch.device, *, memory_limit: int | None = None, local_ranks: int = 1
) -> MemoryMeter | None:
    """Return the meter of ``device``, or ``None`` where memory cannot be read.

    Args:
        device: Where the model is.
        memory_limit: Most that this process may use [bytes]; ``None`` = what there is.
        local_ranks: Ranks that share this host's memory.

    Ranks: any rank, alone.
    """
    if device.type == "cuda":
        return CUDAMeter(device, memory_limit)
    if device.type == "cpu" and sys.platform == "linux":
        return CPUMeter(memory_limit, local_ranks)
    return None


class CUDAMeter(MemoryMeter):
    """The caching allocator of one CUDA device.

    Args:
        device: The device.
        memory_limit: Most that this process may use [bytes].
    """

    noise = 4 * 2**20  # blocks are rounded up to 2 MiB

    def __init__(self, device: torch.device, memory_limit: int | None = None) -> None:
        self.device, self.memory_limit = device, memory_limit
        self.source = "memory_limit" if memory_limit else f"free memory of {device}"

    @property
    def headroom(self) -> float:
        """See :attr:`MemoryMeter.headroom`."""
        return self._limit() - torch.cuda.memory_allocated(self.device)

    def start(self) -> None:
        """See :meth:`MemoryMeter.start`."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def stop(self) -> MemoryReading:
        """See :meth:`MemoryMeter.stop`."""
        torch.cuda.synchronize(self.device)
        return MemoryReading(float(torch.cuda.max_memory_allocated(self.device)), self._limit())

    def _limit(self) -> float:
        free, _ = torch.cuda.mem_get_info(self.device)
        available = free + torch.cuda.memory_reserved(self.device)
        return float(min(available, self.memory_limit or available))


class CPUMeter(MemoryMeter):
    """The memory of this process, as the kernel counts it.

    Which of two numbers is read depends on what binds: the address space where ``RLIMIT_AS`` does (it then
    raises by itself), else private writable memory, which is what a process takes from the host and what
    :func:`~lightning_lockstep.memory.memory_wall` can bound.

    Args:
        memory_limit: Most resident memory that this process may have [bytes]; ``None`` = the control
            group's limit or the host's memory, divided by ``local_ranks``.
        local_ranks: Ranks that share this host's memory.
    """

    noise = 24 * 2**20  # heap, thread stacks and caches of the allocator come and go

    def __init__(self, memory_limit: int | None = None, local_ranks: int = 1) -> None:
        now = _statm()
        if memory_limit is None:
            resident_limit, self.source = _host_limit(local_ranks)
        else:
            resident_limit, self.source = memory_limit, "memory_limit"
        self._metric = 2
        self.limit = float(now[2] + resident_limit - now[1])
        address_space = _address_space_limit()
        if address_space is not None and address_space - now[0] < resident_limit - now[1]:
            self._metric, self.limit, self.source = 0, float(address_space), "RLIMIT_AS"
        self._sampled = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._peak_before = 0

    @property
    def needs_wall(self) -> bool:
        """Whether nothing but our own wall raises before the kernel kills."""
        return self._metric == 2

    @property
    def headroom(self) -> float:
        """See :attr:`MemoryMeter.headroom`."""
        return self.limit - _statm()[self._metric]

    def start(self) -> None:
        """See :meth:`MemoryMeter.start`."""
        self._peak_before = _status("VmPeak")
        self._sampled = _statm()[self._metric]
        self._stop.clear()
        self._thread = threading.Thread(target=self._sample, name="lockstep-memory", daemon=True)
        self._thread.start()

    def stop(self) -> MemoryReading:
        """See :meth:`MemoryMeter.stop`."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
        peak = max(self._sampled, _statm()[self._metric])
        highest = _status("VmPeak")
        if self._metric == 0 and highest > self._peak_before:
            # The kernel saw a new record of the address space in this trial: exact, where samples may miss it.
            peak = highest
        return MemoryReading(float(peak), self.limit)

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self._sampled = max(self._sampled, _statm()[self._metric])


_PAGE = 4096
if sys.platform == "linux":
    import resource

    _PAGE = resource.getpagesize()


def _statm() -> tuple[int, int, int]:
    """Return (address space, resident, private writable) memory of this process [bytes]."""
    fields = Path("/proc/self/statm").read_bytes().split()
    return int(fields[0]) * _PAGE, int(fields[1]) * _PAGE, int(fields[5]) * _PAGE


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _address_space_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _host_limit(local_ranks: int) -> tuple[int, str]:
    """Return (bytes for this process, where that comes from)."""
    limits = [(_physical_memory(), "memory of this host")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # absent, or the word "max"
            limits.append((int(Path(file).read_text()), "memory of this control group"))
    size, source = min(limits)
    if local_ranks > 1:
        source = f"{source} / {local_ranks} ranks"
    return size // local_ranks, source


def _physical_memory() -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 2**63
