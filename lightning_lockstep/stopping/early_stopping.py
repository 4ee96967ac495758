"""The value that early stopping looks at: one made of what all ranks have, gathered with or without a stall."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.distributed.side_channel.gather import Gather
from lightning_lockstep.errors import MetricMissingError

# -- One value of those of all ranks, from numbers alone: no Trainer, no ranks, no clock --

Reduction = Literal["mean", "min", "max", "rank0"]
REDUCTIONS = ("mean", "min", "max", "rank0")
MISSING = ("error", "use_present")

_DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """What one rank has of the monitored metric; as JSON a list, in which nan and infinities stay what they are."""

    value: float | None  # None: the rank has not logged it
    dtype: str = "float32"  # of the metric, without 'torch.'
    names: Sequence[str] = ()  # what the rank has logged, where the metric is not among it

    @classmethod
    def of(cls, metric: Tensor | None, names: Sequence[str]) -> Entry:
        """Return the entry for a metric that holds one number, or for its absence."""
        if metric is None:
            return cls(None, names=names)
        return cls(float(metric), _NAMES[metric.dtype])


class Reduced(NamedTuple):
    """One value for all ranks."""

    number: float
    dtype: torch.dtype  # the metric's own
    not_finite: tuple[int, ...]  # ranks whose value took part and is nan or infinite

    @property
    def value(self) -> Tensor:
        """The value as a tensor without dimensions."""
        number = self.number if self.dtype.is_floating_point else int(self.number)
        return torch.tensor(number, dtype=self.dtype)


def combine(
    entries: Sequence[Entry],  # in rank order
    *,
    monitor: str,
    how: Reduction,
    missing: str,  # error; use_present: some ranks may lack the metric
    strict: bool,  # whether it is an error if no rank has it
) -> Reduced | None:
    """Return one value of those of all ranks, or ``None`` where none has the metric and that is allowed."""
    absent = 0
    for entry in entries:
        absent += entry.value is None
    if absent == len(entries) and not strict:
        return None
    if absent == len(entries) or (absent and missing == "error"):
        raise MetricMissingError(missing_message(monitor, entries))
    return reduce_entries(entries, how)


def reduce_entries(
    entries: Sequence[Entry],  # in rank order; one at least has a value
    how: Reduction,  # rank0: the value of the lowest rank that has one
) -> Reduced:
    """Return one value from those of the ranks that have the metric."""
    values: list[float] = []
    dtype, not_finite = torch.float32, []
    for rank, (value, name, _) in enumerate(entries):
        if value is None or (values and how == "rank0"):
            continue
        if not values:
            dtype = _DTYPES[name]
        values.append(value)
        if not math.isfinite(value):
            not_finite.append(rank)
    if not_finite and any(map(math.isnan, values)):
        number = math.nan
    elif how in ("mean", "rank0"):
        number = sum(values) / len(values)
    else:
        number = (min if how == "min" else max)(values)
    if how == "mean" and not dtype.is_floating_point and len(values) > 1:
        dtype = torch.float32
    return Reduced(number, dtype, tuple(not_finite))


def missing_message(monitor: str, entries: Sequence[Entry]) -> str:
    """Return the text for a metric that some ranks, or all, have not logged; the same on every rank."""
    names = list(dict.fromkeys(name for entry in entries for name in entry.names))
    absent = [rank for rank, entry in enumerate(entries) if entry.value is None]
    if len(absent) == len(entries):
        return (
            f"Early stopping conditioned on metric `{monitor}` which is not available."
            " Pass in or modify your `EarlyStopping` callback to use any of the following:"
            f" `{'`, `'.join(names)}`{did_you_mean(monitor, names)}"
        )
    present = [rank for rank in range(len(entries)) if rank not in absent]
    return (
        f"Early stopping monitors `{monitor}`, which is logged by {ranks_in_words(present)} and not by"
        f" {ranks_in_words(absent)}. Log it on every rank, or pass missing='use_present' to decide"
        " from the ranks that have it."
    )


# -- A metric of every rank at every k-th step, available a step later, without a stall --

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
    """Posts this rank's value at every k-th optimizer step and returns those of all ranks at the next one."""

    # Every rank takes the same steps, so every rank reads the same values after the same step. A value on an
    # accelerator is copied without blocking and takes one step more.

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
        """Return what all ranks had at earlier steps and has not been returned yet, oldest first."""
        # On every rank, after every batch. Waits only for what is still in flight.
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
        self._gather.post(step, entry)
        self._posted.append(step)

    def _read_all(self) -> list[list[Entry]]:
        steps, self._posted = self._posted, []
        return [self._read(step) for step in steps]

    def _read(self, step: int) -> list[Entry]:
        gathered = self._gather.read(step)
        if gathered.missing:
            gathered.complete(f"The metric of step {step}")  # raises
        return [Entry(*entry) for entry in gathered.entries.values()]
