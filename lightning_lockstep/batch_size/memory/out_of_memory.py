"""Which errors mean that memory ran out, and how to get it back.

Only errors that say so count. A shape error, a device-side assertion or a bug must surface at once, not be
mistaken for a batch that is too large.
"""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_lockstep._text import first_line
from lightning_lockstep.batch_size.memory import malloc

__all__ = ["Failure", "attempt", "is_out_of_memory", "release_memory"]

# What allocators and libraries write, in lower case. Each is specific enough not to appear in other errors.
_TEXTS = (
    "cuda out of memory",
    "hip out of memory",
    "xpu out of memory",
    "mps backend out of memory",
    "npu out of memory",  # Ascend
    "module:pt_devmem allocation failed",  # HPU
    "cuda error: out of memory",
    "hip error: out of memory",
    "cuda driver error: out of memory",
    "cuda failure 'out of memory'",  # nccl, when it allocates its own buffers
    "cuda failure 2 'out of memory'",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_host_allocation_failed",
    "cudnn_status_internal_error_device_allocation_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "cufft_alloc_failed",
    "hipblas_status_alloc_failed",
    "miopenstatusallocfailed",
    "resource_exhausted",  # XLA
    "error preparing computation: out of memory allocating",  # XLA on CPU
    "ur_result_error_out_of_device_memory",  # XPU
    "ur_result_error_out_of_host_memory",
    "outofmemory",  # Metal: kIOGPUCommandBufferCallbackErrorOutOfMemory
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
    """Call ``function`` and return how it failed, or ``None``.

    When this returns, the ``except`` clause is over and nothing holds the frames of a call that ran out of
    memory: what they held can be freed.
    """
    try:
        function()
    except Exception as error:
        return Failure.of(error)
    return None


def release_memory(*, collect: bool = True) -> None:
    """Give memory that nothing uses back to the device, or on CPU to the operating system.

    Must not be called inside an ``except`` clause, whose error holds tensors.
    """
    if collect:
        gc.collect()  # after an error reference cycles can hold tensors
    device = torch.accelerator.current_accelerator(check_available=True)
    # Not by torch.accelerator.empty_cache, which raises where torch does not know the allocator of the device.
    backend: Any = None if device is None else getattr(torch, device.type, None)
    if hasattr(backend, "empty_cache") and getattr(backend, "is_initialized", lambda: True)():
        backend.empty_cache()
    malloc.trim()
