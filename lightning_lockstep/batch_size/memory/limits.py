"""Limits memory during a trial, so that exceeding it raises instead of invoking the OOM killer.

On CPU nothing stops a process that takes too much until the kernel kills it. For the time of a trial the
process therefore bounds itself: an allocation beyond the limit fails with an ordinary error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_lockstep.batch_size.memory.meter import CPUMeter, CUDAMeter, MemoryMeter

__all__ = ["limited_memory"]


@contextmanager
def limited_memory(meter: MemoryMeter | None) -> Iterator[None]:
    """Let allocations beyond the limit of ``meter`` fail while the body runs."""
    if isinstance(meter, CPUMeter) and meter.judges and sys.platform == "linux":
        with _data_limit(meter):
            yield
    elif isinstance(meter, CUDAMeter) and meter.memory_limit is not None:
        total = torch.cuda.get_device_properties(meter.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, meter.memory_limit / total), meter.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, meter.device)
    else:  # the limit raises by itself, or memory cannot be read
        yield


@contextmanager
def _data_limit(meter: CPUMeter) -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    ceiling = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    # Counted from now: pages that were given back, but whose addresses malloc keeps, can be used again.
    resource.setrlimit(resource.RLIMIT_DATA, (min([meter.data_limit, *ceiling]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
