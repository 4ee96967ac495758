"""How much memory a trial used at its peak, and how much there is.

On CUDA the caching allocator knows. On CPU it is the kernel: what is counted is what the limit that binds
counts, so that a prediction meets the wall where it stands. The kernel keeps the highest value itself; samples
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
from typing import NamedTuple

import torch

from lightning_lockstep._system import memory_limit
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
        peak: Most that was in use at once; ``None`` where it was not above an earlier peak that hides it.
        limit: Most that can be in use.
    """

    peak: float | None
    limit: float


class MemoryMeter(ABC):
    """Reads the memory of one process on one device.

    Attributes:
        source: Where the limit comes from, for people.
        noise: Difference between two peaks below which it says nothing [bytes].
        judges: Whether a peak above the limit means that a size does not fit, although nothing was raised.
    """

    source: str = ""
    noise: float = 0.0
    judges: bool = False

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
    device: torch.device, *, memory_limit: int | None = None, local_ranks: int = 1, owed: int = 0
) -> MemoryMeter | None:
    """Return the meter of ``device``, or ``None`` where memory cannot be read.

    Args:
        device: Where the model is.
        memory_limit: Most that this process may use [bytes]; ``None`` = what there is.
        local_ranks: Ranks that share this host's memory.
        owed: Memory on CPU that the run will take and a trial does not [bytes].

    Ranks: any rank, alone.
    """
    if device.type == "cuda":
        return CUDAMeter(device, memory_limit)
    if device.type == "cpu" and sys.platform == "linux":
        return CPUMeter(memory_limit, local_ranks, owed)
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

    What is read depends on what binds: the address space where ``RLIMIT_AS`` does, which raises by itself, else
    resident memory, which is what a process takes from its host or control group, and for which the kernel
    kills.

    Args:
        memory_limit: Most resident memory that this process may have [bytes]; ``None`` = the control
            group's limit or the host's memory, divided by ``local_ranks``.
        local_ranks: Ranks that share this host's memory.
        owed: What the run will take and a trial does not [bytes]; counted as if it were in use.
    """

    noise = 24 * 2**20  # heap and caches of the allocator come and go

    def __init__(self, memory_limit: int | None = None, local_ranks: int = 1, owed: int = 0) -> None:
        now = _statm()
        if memory_limit is None:
            resident_limit, self.source = _host_limit(local_ranks)
        else:
            resident_limit, self.source = memory_limit, "memory_limit"
        self.limit, self.judges = float(resident_limit), True
        address_space = _address_space_limit()
        if address_space is not None and address_space - now.address_space < resident_limit - now.resident:
            self.limit, self.judges, self.source = float(address_space), False, "RLIMIT_AS"
        self._owed, self._peak_before = owed, 0
        self._samples: _Samples | None = None

    @property
    def headroom(self) -> float:
        """See :attr:`MemoryMeter.headroom`."""
        now = _statm()
        return self.limit - self._owed - (now.resident if self.judges else now.address_space)

    @property
    def data_limit(self) -> int:
        """Private writable memory at which resident memory reaches the limit, from where it is now [bytes]."""
        return _statm().data + max(0, int(self.headroom))

    def start(self) -> None:
        """See :meth:`MemoryMeter.start`."""
        self._peak_before = _status("VmPeak")
        if self.judges and not _reset_peak_of_resident():
            self._samples = _Samples()

    def stop(self) -> MemoryReading:
        """See :meth:`MemoryMeter.stop`."""
        if not self.judges:
            highest = _status("VmPeak")
            return MemoryReading(float(highest) if highest > self._peak_before else None, self.limit)
        if self._samples is None:
            return MemoryReading(float(_status("VmHWM") + self._owed), self.limit)
        samples, self._samples = self._samples, None
        return MemoryReading(float(samples.stop() + self._owed), self.limit)


class _Samples:
    """Highest resident memory among samples, where the kernel does not let its own record be reset."""

    def __init__(self) -> None:
        self._highest = _statm().resident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="lockstep-memory", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return max(self._highest, _statm().resident)

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self._highest = max(self._highest, _statm().resident)


def _reset_peak_of_resident() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    # Some sandboxes take the word and do nothing.
    return _status("VmHWM") <= _statm().resident + 16 * 2**20


_PAGE = 4096
if sys.platform == "linux":
    import resource

    _PAGE = resource.getpagesize()


class _Statm(NamedTuple):
    """Memory of this process [bytes]."""

    address_space: int
    resident: int
    data: int


def _statm() -> _Statm:
    fields = Path("/proc/self/statm").read_bytes().split()
    return _Statm(*(int(fields[place]) * _PAGE for place in (0, 1, 5)))


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _address_space_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _host_limit(local_ranks: int) -> tuple[int, str]:
    """Return (bytes for this process, where that comes from)."""
    size, source = memory_limit()
    return size // local_ranks, source if local_ranks == 1 else f"{source} / {local_ranks} ranks"
