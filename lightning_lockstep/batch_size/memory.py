"""Memory: what counts as out of memory, how much there is, how a trial is kept within it."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_lockstep._system import memory_limit
from lightning_lockstep._text import first_line
from lightning_lockstep.errors import ConfigurationError

# -- How the C library keeps freed memory, which decides what a batch needs on CPU --
# glibc returns a freed block to the system when it was large enough to be mapped by itself. It raises what
# "large enough" means to the largest block freed so far (up to 32 MiB), and keeps the others for itself,
# where the next batch's blocks may or may not fit into the holes. What a step needs then depends on all
# that ran before it: half as much again was seen, and a size that fitted may not fit when it is tried
# again.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_RETURNED_FROM = 2**20
_KEPT_UP_TO = 32 * 2**20  # where glibc's own growth ends


@cache
def _c_function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def trim() -> None:
    """Return what malloc keeps unused to the system, where the C library can."""
    function = _c_function("malloc_trim")
    if function is not None:
        function(0)


def return_freed_memory() -> None:
    """Let every block of 1 MiB or more go back to the system when it is freed."""
    # Memory in use is then what is alive: the same step needs the same, whatever ran before it. The system
    # has to supply the pages again in the next step, which takes time. Does nothing where the C library is
    # not glibc, or where the environment has set its thresholds.
    _set_thresholds(_RETURNED_FROM)


def keep_freed_memory() -> None:
    """Let freed blocks of up to 32 MiB stay with malloc, as glibc comes to do by itself."""
    _set_thresholds(_KEPT_UP_TO)


def _set_thresholds(size: int) -> None:
    mallopt = _c_function("mallopt")
    own = "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is None or _c_function("gnu_get_libc_version") is None or own:
        return
    mallopt(_MMAP_THRESHOLD, size)
    mallopt(_TRIM_THRESHOLD, 2 * size)


# -- How much memory a trial used at its peak, and how much there is --
# On CUDA the caching allocator knows. On CPU it is the kernel: what is counted is what the limit that binds
# counts, so that a prediction meets the limit where it is. The kernel keeps the highest value itself;
# samples would miss peaks.

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
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = torch.cuda.get_per_process_memory_fraction(self.device) * total
        available = min(free + torch.cuda.memory_reserved(self.device), allowed)
        return float(min(available, self.memory_limit or available))


class CPUMeter(MemoryMeter):
    """The memory of this process, as the kernel counts it."""

    # What is read depends on what binds: the address space where ``RLIMIT_AS`` does, which raises by itself,
    # else resident memory, which is what a process takes from its host or control group, and for which the
    # kernel kills.

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
        # What the run will take and a trial does not [bytes]. It counts as if it were in use.
        self._owed = owed if self.judges else 0
        self._record = "VmHWM" if self.judges else "VmPeak"
        self._before = (0, 0)  # record and use when a trial began

    @property
    def headroom(self) -> float:
        return float(self.limit - self._owed - self._in_use)

    @property
    def data_limit(self) -> int:
        """Private writable memory at which resident memory reaches the limit, from where it is now [bytes]."""
        data: int = self._process.memory_info().data
        return data + max(0, int(self.headroom))

    @property
    def _in_use(self) -> int:
        now = self._process.memory_info()
        return int(now.rss if self.judges else now.vms)

    def start(self) -> None:
        if self.judges:
            with suppress(OSError):
                # Sets the record to what is in use. Some sandboxes refuse it, or accept it and do nothing.
                Path("/proc/self/clear_refs").write_text("5")
        self._before = _peak(self._record), self._in_use

    def stop(self) -> MemoryUse:
        highest, (record, in_use) = _peak(self._record), self._before
        known = highest > record or abs(record - in_use) <= 16 * 2**20
        return MemoryUse(float(highest + self._owed) if known else None, self.limit)


def _peak(name: str) -> int:
    """Return a highest value that the kernel keeps and psutil does not read [bytes]."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _host_limit(local_ranks: int) -> tuple[int, str]:
    """Return (bytes for this process, where that comes from)."""
    size, source = memory_limit()
    return size // local_ranks, source if local_ranks == 1 else f"{source} / {local_ranks} ranks"


# -- Limits memory during a trial, so that exceeding it raises instead of invoking the OOM killer --
# On CPU nothing stops a process that takes too much until the kernel kills it. For the time of a trial the
# process therefore bounds itself: an allocation beyond the limit fails with an ordinary error.


@contextmanager
def limited_memory(meter: MemoryMeter | None) -> Iterator[None]:
    """Let allocations beyond the limit of ``meter`` fail while the body runs."""
    with ExitStack() as stack:
        if isinstance(meter, CPUMeter) and meter.judges:
            import resource  # not on every system

            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            ceiling = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
            # Counted from now: pages that were given back, but whose addresses malloc keeps, can be used again.
            resource.setrlimit(resource.RLIMIT_DATA, (min([meter.data_limit, *ceiling]), hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_DATA, (soft, hard))
        elif isinstance(meter, CUDAMeter) and meter.memory_limit is not None:
            total = torch.cuda.get_device_properties(meter.device).total_memory
            before = torch.cuda.get_per_process_memory_fraction(meter.device)
            share = min(before, meter.memory_limit / total)
            torch.cuda.set_per_process_memory_fraction(share, meter.device)
            stack.callback(torch.cuda.set_per_process_memory_fraction, before, meter.device)
        yield  # else the limit raises by itself, or memory cannot be read


# -- Which errors mean that memory ran out, and how to get it back --
# Only errors that say so count. A shape error, a device-side assertion or a bug must surface at once, not
# be mistaken for a batch that is too large.

# What allocators and libraries write, in lower case.
_TEXTS = (
    "out of memory",  # CUDA, HIP, XPU, MPS, NPU, nccl; XLA on CPU
    "outofmemory",  # Metal: kIOGPUCommandBufferCallbackErrorOutOfMemory
    "out_of_device_memory",  # XPU: UR_RESULT_ERROR_...
    "out_of_host_memory",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "alloc_failed",  # CUBLAS_STATUS_..., CUDNN_STATUS_..., CUSOLVER, CUSPARSE, CUFFT, HIPBLAS
    "cudnn_status_internal_error_host_allocation_failed",
    "cudnn_status_internal_error_device_allocation_failed",
    "miopenstatusallocfailed",
    "module:pt_devmem allocation failed",  # HPU
    "resource_exhausted",  # XLA
    "std::bad_alloc",
)
# cuDNN answers this too when no algorithm's workspace fits; it counts only while the GPU is nearly full.
_CUDNN_UNSUPPORTED = "cudnn error: cudnn_status_not_supported"
_NEARLY_FULL = 0.9


def is_out_of_memory(error: BaseException, *, memory_is_short: Callable[[], bool] | None = None) -> bool:
    """Return whether ``error`` says that memory ran out, on whatever device."""
    seen: BaseException | None = error
    while seen is not None:
        if _says_so(seen, memory_is_short or _cuda_is_nearly_full):
            return True
        seen = seen.__cause__
    return False


def _says_so(error: BaseException, memory_is_short: Callable[[], bool]) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    if any(known in text for known in _TEXTS):
        return True
    return _CUDNN_UNSUPPORTED in text and memory_is_short()


def _cuda_is_nearly_full() -> bool:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return False
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    return torch.cuda.max_memory_reserved() + others >= _NEARLY_FULL * total


@dataclass(frozen=True)
class Failure:
    """How an attempt failed."""

    summary: str  # the error's type and its first line
    out_of_memory: bool
    # None when memory ran out: its traceback would hold the tensors of the frames it passed.
    error: Exception | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        name, line = type(error).__name__, first_line(error)
        summary = name if line == name else f"{name}: {line}"
        full = is_out_of_memory(error)
        return cls(summary, full, None if full else error)


def attempt(function: Callable[[], Any]) -> Failure | None:
    """Call ``function`` and return how it failed, or ``None``."""
    # When this returns, the ``except`` clause is over and nothing holds the frames of a call that ran out of
    # memory: what they held can be freed.
    try:
        function()
    except Exception as error:
        return Failure.of(error)
    return None


def release_memory(*, collect: bool = True) -> None:
    """Give memory that nothing uses back to the device, or on CPU to the operating system."""
    # Must not be called inside an ``except`` clause, whose error holds tensors.
    if collect:
        gc.collect()  # after an error reference cycles can hold tensors
    device = torch.accelerator.current_accelerator(check_available=True)
    # Not by torch.accelerator.empty_cache, which raises where torch does not know the allocator of the device.
    backend: Any = None if device is None else getattr(torch, device.type, None)
    if hasattr(backend, "empty_cache") and getattr(backend, "is_initialized", lambda: True)():
        backend.empty_cache()
    trim()
