"""What counts as out of memory."""

from __future__ import annotations

import errno
import gc
import weakref

import pytest
import torch

from lightning_lockstep.batch_size.memory import attempt, is_out_of_memory, parse_bytes
from lightning_lockstep.errors import ConfigurationError

FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("RESOURCE_EXHAUSTED: Attempting to reserve 12.00G at the bottom of memory."),
    RuntimeError("XPU out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
    RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.96 GiB total capacity)"),
    RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1073741824"),
    RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nDefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]
OTHER = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 2x5)"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("CUDA out of memory"),
    OSError(errno.ENOENT, "No such file"),
    RuntimeError("expected scalar type Float but found Half"),
]


@pytest.mark.parametrize("error", FULL, ids=lambda e: f"{type(e).__name__}: {str(e)[:40]}")
def test_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHER, ids=lambda e: f"{type(e).__name__}: {str(e)[:40]}")
def test_not_memory(error):
    assert not is_out_of_memory(error)


def test_a_cause_counts():
    wrapped = RuntimeError("backend failed")
    wrapped.__cause__ = MemoryError()
    assert is_out_of_memory(wrapped)


def test_what_a_failed_attempt_held_is_free_when_it_returns():
    seen = []

    def step() -> None:
        tensor = torch.zeros(10)
        seen.append(weakref.ref(tensor))
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    gc.disable()
    try:
        failure = attempt(step)
        assert failure is not None and failure.out_of_memory and seen[0]() is None
    finally:
        gc.enable()
    other = attempt(lambda: [][1])
    assert other is not None and not other.out_of_memory and isinstance(other.error, IndexError)


def test_amounts():
    assert [parse_bytes(x) for x in ("4GiB", "500 MB", "1k", 7)] == [4 * 2**30, 500 * 10**6, 1000, 7]
    for wrong in ("4 apples", "", 0, -1, True, None):
        with pytest.raises(ConfigurationError, match="expected a number of bytes"):
            parse_bytes(wrong)
