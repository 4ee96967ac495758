"""A metric of every rank at every k-th step, available a step later, without a stall."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep.distributed.side_channel.base import SideChannel
from lightning_lockstep.distributed.side_channel.gather import Gather
from lightning_lockstep.stopping.early_stopping_rule import Entry

__all__ = ["StepMetric"]

# Longest wait for a rank's value [s], that of torch's process groups: another rank may be busy with something
# that it alone does, such as writing a large checkpoint.
_TIMEOUT = 1800.0


@dataclass
class _Copy:
    """A value on its way from the device; read once the step after its own has been queued."""

    step: int
    value: Tensor
    arrived: Any


class StepMetric:
    """Posts this rank's value at every k-th optimizer step and returns those of all ranks at the next one.

    Every rank takes the same steps, so every rank reads the same values after the same step. A value on an
    accelerator is copied without blocking and takes one step more.
    """

    def __init__(self, channel: SideChannel, name: str, *, every: int) -> None:
        self.every = every  # [optimizer steps]
        self._gather = Gather(channel, name, timeout=_TIMEOUT)
        self._last_step = 0
        self._copy: _Copy | None = None
        self._posted: list[int] = []

    def begin(self, step: int) -> None:
        """Start to count at ``step`` [optimizer steps]."""
        self._last_step = step

    def after_batch(
        self,
        step: int,  # optimizer steps done so far
        read: Callable[[], tuple[Tensor | None, list[str]]],  # metric, names of all logged; called when due
    ) -> list[list[Entry]]:
        """Return what all ranks had at earlier steps and has not been returned yet, oldest first.

        On every rank, after every batch. Waits only for what is still in flight.
        """
        if step == self._last_step:
            return []
        gathered = self._read_all()
        if self._copy is not None:
            self._post_copy(self._copy)
        if step // self.every > self._last_step // self.every:
            self._start(step, *read())
        self._last_step = step
        return gathered

    def drain(self) -> list[list[Entry]]:
        """Return all that is in flight; after it nothing is. On every rank, at the same place."""
        if self._copy is not None:
            self._post_copy(self._copy)
        return self._read_all()

    def close(self) -> None:
        self._gather.close()

    def _start(self, step: int, metric: Tensor | None, names: list[str]) -> None:
        if metric is None or metric.is_cpu:
            self._post(step, Entry.of(metric, names))
            return
        if (
            metric.device.type == "xla"
        ):  # a copy would wait for this step; once the next one is queued, hardly
            self._copy = _Copy(step, metric.detach(), None)
            return
        value = metric.detach().to("cpu", non_blocking=True)
        arrived = None
        if metric.device.type == "cuda":
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(metric.device))
        self._copy = _Copy(step, value, arrived)

    def _post_copy(self, copy: _Copy) -> None:
        if copy.arrived is not None:
            copy.arrived.synchronize()
        self._copy = None
        self._post(copy.step, Entry.of(copy.value, ()))

    def _post(self, step: int, entry: Entry) -> None:
        self._gather.post(step, entry.pack())
        self._posted.append(step)

    def _read_all(self) -> list[list[Entry]]:
        steps, self._posted = self._posted, []
        return [self._read(step) for step in steps]

    def _read(self, step: int) -> list[Entry]:
        gathered = self._gather.read(step)
        if gathered.missing:
            gathered.complete(f"The metric of step {step}")  # raises
        return [Entry.unpack(packed) for packed in gathered.entries.values()]
