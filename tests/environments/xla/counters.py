"""What torch-xla has done in this process, by its own counters."""

from __future__ import annotations

import importlib
from typing import Any

import lightning as L


def device_reads() -> int:
    """Return how many transfers from the devices there have been."""
    took = importlib.import_module("torch_xla.debug.metrics").metric_data("TransferFromDeviceTime")
    return int(took[0]) if took else 0


def compilations() -> int:
    """Return how many graphs have been compiled."""
    metrics = importlib.import_module("torch_xla.debug.metrics")
    return int(metrics.counter_value("UncachedCompile") or 0)


class Counts(L.Callback):
    """Counts after each training batch, after the callbacks that are before this one."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.compiled: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.reads.append(device_reads())
        self.compiled.append(compilations())

    def reads_by_batch(self) -> dict[int, int]:
        """Return how often each batch after the first has read, for those that did."""
        pairs = zip(self.reads, self.reads[1:], strict=False)
        return {batch: after - before for batch, (before, after) in enumerate(pairs, 1) if after > before}
