"""How much memory a trial used at its peak, and how much there is.

On CUDA the caching allocator knows. On CPU it is the kernel: what is counted is what the limit that binds
counts, so that a prediction meets the limit where it is. The kernel keeps the highest value itself; samples
would miss peaks, and the thread that takes them has a stack and an allocator's arena of its own.
"""

from __future__ import annotations

import re
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lightning_lockstep._system import memory_limit
from lightning_lockstep.errors import ConfigurationError

__all__ = ["CPUMeter", "CUDAMeter", "MemoryMeter", "MemoryUse", "meter_for", "parse_bytes"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str | int | float) -> int:
    """Return the number of bytes in a number or in text such as ``"4GiB"`` or ``"500 MB"``."""
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
class MemoryUse:
    """Peak and limit of one trial [bytes]."""

    peak: float | None  # None: not above an earlier peak, which hides it
    limit: float


class MemoryMeter(ABC):
    """Reads the memory of one process on one device."""

    source: str = ""  # where the limit comes from, for people
    noise: float = 0.0  # peaks that differ by less say nothing [bytes]
    judges: bool = False  # whether a size with a peak above the limit does not fit, though nothing was raised

    @abstractmethod
    def start(self) -> None:
        """Begin to watch for the peak."""

    @abstractmethod
    def stop(self) -> MemoryUse:
        """Return the peak since :meth:`start`, and the limit."""

    @property
    @abstractmethod
    def headroom(self) -> float:
        """What can still be taken now [bytes]."""


def meter_for(
    device: torch.device, *, memory_limit: int | None = None, local_ranks: int = 1, owed: int = 0
) -> MemoryMeter | None:
    """Return the meter of ``device``, or ``None`` where memory cannot be read."""
    if device.type == "cuda":
        return CUDAMeter(device, memory_limit)
    if device.type == "cpu" and sys.platform == "linux":
        return CPUMeter(memory_limit, local_ranks, owed)
    return None


class CUDAMeter(MemoryMeter):
    """The caching allocator of one CUDA device."""

    noise = 4 * 2**20  # blocks are rounded up to 2 MiB

    def __init__(self, device: torch.device, memory_limit: int | None = None) -> None:
        self.device, self.memory_limit = device, memory_limit
        self.source = "memory_limit" if memory_limit else f"free memory of {device}"

    @property
    def headroom(self) -> float:
        return self._limit() - torch.cuda.memory_allocated(self.device)

    def start(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def stop(self) -> MemoryUse:
        torch.cuda.synchronize(self.device)
        return MemoryUse(float(torch.cuda.max_memory_allocated(self.device)), self._limit())

    def _limit(self) -> float:
        free, _ = torch.cuda.mem_get_info(self.device)
        available = free + torch.cuda.memory_reserved(self.device)
        return float(min(available, self.memory_limit or available))


class CPUMeter(MemoryMeter):
    """The memory of this process, as the kernel counts it.

    What is read depends on what binds: the address space where ``RLIMIT_AS`` does, which raises by itself, else
    resident memory, which is what a process takes from its host or control group, and for which the kernel
    kills.
    """

    noise = 24 * 2**20  # the allocator's caches come and go

    def __init__(self, memory_limit: int | None = None, local_ranks: int = 1, owed: int = 0) -> None:
        self._process = psutil.Process()
        now = self._process.memory_info()
        if memory_limit is None:
            resident_limit, self.source = _host_limit(local_ranks)
        else:
            resident_limit, self.source = memory_limit, "memory_limit"
        self.limit, self.judges = float(resident_limit), True
        address_space, _ = self._process.rlimit(psutil.RLIMIT_AS)
        unlimited = address_space == psutil.RLIM_INFINITY
        if not unlimited and address_space - now.vms < resident_limit - now.rss:
            self.limit, self.judges, self.source = float(address_space), False, "RLIMIT_AS"
        # Owed: what the run will take and a trial does not [bytes]. It counts as if it were in use.
        self._owed, self._peak_before = owed, 0
        self._samples: _Samples | None = None

    @property
    def headroom(self) -> float:
        now = self._process.memory_info()
        return float(self.limit - self._owed - (now.rss if self.judges else now.vms))

    @property
    def data_limit(self) -> int:
        """Private writable memory at which resident memory reaches the limit, from where it is now [bytes]."""
        data: int = self._process.memory_info().data
        return data + max(0, int(self.headroom))

    def start(self) -> None:
        self._peak_before = _peak("VmPeak")
        if self.judges and not _reset_peak_of_resident(self._process):
            self._samples = _Samples(self._process)

    def stop(self) -> MemoryUse:
        if not self.judges:
            highest = _peak("VmPeak")
            return MemoryUse(float(highest) if highest > self._peak_before else None, self.limit)
        if self._samples is None:
            return MemoryUse(float(_peak("VmHWM") + self._owed), self.limit)
        samples, self._samples = self._samples, None
        return MemoryUse(float(samples.stop() + self._owed), self.limit)


class _Samples:
    """Highest resident memory among samples, where the kernel does not let its own record be reset."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._highest = process, int(process.memory_info().rss)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="lockstep-memory", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        self._highest = max(self._highest, self._process.memory_info().rss)
        return self._highest

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self._highest = max(self._highest, self._process.memory_info().rss)


def _reset_peak_of_resident(process: psutil.Process) -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    # Some sandboxes accept the write and do nothing.
    resident: int = process.memory_info().rss
    return _peak("VmHWM") <= resident + 16 * 2**20


def _peak(name: str) -> int:
    """Return a highest value that the kernel keeps and psutil does not read [bytes]."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _host_limit(local_ranks: int) -> tuple[int, str]:
    """Return (bytes for this process, where that comes from)."""
    size, source = memory_limit()
    return size // local_ranks, source if local_ranks == 1 else f"{source} / {local_ranks} ranks"
