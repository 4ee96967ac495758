"""The rule of early stopping, and the value that it looks at, gathered from all ranks."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_lockstep._doors.lightning import EarlyStoppingReason
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.distributed.side_channel.gather import Gather
from lightning_lockstep.errors import MetricMissingError

# -- Whether to stop, from numbers alone: no Trainer, no ranks, no clock --

Reduction = Literal["mean", "min", "max", "rank0"]
REDUCTIONS = ("mean", "min", "max", "rank0")
MISSING = ("error", "use_present")
MODES = {"min": (torch.lt, "<"), "max": (torch.gt, ">")}

_NOT_STOPPED = EarlyStoppingReason.NOT_STOPPED
_DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """What one rank has of the monitored metric."""

    value: float | None  # None: the rank has not logged it
    dtype: str = "float32"  # of the metric, without 'torch.'
    names: tuple[str, ...] = ()  # what the rank has logged, where the metric is not among it

    @classmethod
    def of(cls, metric: Tensor | None, names: Sequence[str]) -> Entry:
        """Return the entry for a metric that holds one number, or for its absence."""
        if metric is None:
            return cls(None, names=tuple(names))
        return cls(float(metric), _NAMES[metric.dtype])

    def pack(self) -> list[Any]:
        """Return the entry as something JSON can hold; nan and infinities are no numbers there."""
        return [None if self.value is None else repr(self.value), self.dtype, list(self.names)]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Entry:
        """Return the entry that :meth:`pack` packed."""
        value, dtype, names = packed
        return cls(None if value is None else float(value), dtype, tuple(names))


class Reduced(NamedTuple):
    """One value for all ranks."""

    number: float  # rounded as the dtype is
    dtype: torch.dtype = torch.float32  # the metric's own
    not_finite: tuple[int, ...] = ()  # ranks whose value took part and is nan or infinite
    ranks: int = 1  # how many

    @property
    def value(self) -> Tensor:
        """The value as a tensor without dimensions."""
        number = self.number if self.dtype.is_floating_point else int(self.number)
        return torch.tensor(number, dtype=self.dtype)


class Progress(NamedTuple):
    """How far the search for a better value has come."""

    best_score: Tensor | Reduced  # a tensor is made of it when somebody asks
    wait_count: int = 0  # checks since then without an improvement


class Decision(NamedTuple):
    """The outcome of one check."""

    stop: bool
    reason: EarlyStoppingReason  # NOT_STOPPED where stop is false
    message: str | None  # for the user; None: nothing happened
    progress: Progress  # after this check


class StopRule(NamedTuple):
    """When to stop; the names are those of Lightning's ``EarlyStopping``."""

    monitor: str
    mode: str = "min"  # min or max
    min_delta: float = 0.0  # with the sign of the direction, as Lightning's attribute has it
    patience: int = 3  # [checks]
    check_finite: bool = True  # whether nan or an infinity stops
    stopping_threshold: float | None = None  # a better value stops
    divergence_threshold: float | None = None  # a worse value stops

    def decide(
        self,
        progress: Progress,  # before this check
        reduced: Reduced,
        *,
        explain: bool = True,  # whether an improvement needs a message, which costs more than the decision
    ) -> Decision:
        """Return the decision on one value, in the arithmetic of the metric's own dtype."""
        stop = self._stops_at_once(reduced, progress.best_score)
        if stop is not None:
            reason, text = stop
            return Decision(True, reason, f"{text} Signaling Trainer to stop.", progress)
        if self._improves(reduced, progress.best_score):
            message = self._improvement(reduced.value, _tensor(progress.best_score)) if explain else None
            return Decision(False, _NOT_STOPPED, message, Progress(reduced, 0))
        waited = Progress(progress.best_score, progress.wait_count + 1)
        if waited.wait_count < self.patience:
            return Decision(False, _NOT_STOPPED, None, waited)
        message = (
            f"Monitored metric {self.monitor} did not improve in the last {waited.wait_count} records."
            f" Best score: {_tensor(progress.best_score):.3f}. Signaling Trainer to stop."
        )
        return Decision(True, EarlyStoppingReason.PATIENCE_EXHAUSTED, message, waited)

    def _improves(self, reduced: Reduced, best: Tensor | Reduced) -> bool:
        if not self.min_delta and reduced.dtype in (torch.float32, torch.float64):
            # Python compares numbers of these as torch does, in a tenth of the time.
            number, other = reduced.number, best.number if isinstance(best, Reduced) else float(best)
            return number < other if self.mode == "min" else number > other
        return bool(MODES[self.mode][0](reduced.value - self.min_delta, _tensor(best).cpu()))

    def _stops_at_once(
        self, reduced: Reduced, best: Tensor | Reduced
    ) -> tuple[EarlyStoppingReason, str] | None:
        if self.check_finite and (reduced.not_finite or not math.isfinite(reduced.number)):
            message = f"Monitored metric {self.monitor} = {reduced.value} is not finite."
            if reduced.ranks > 1 and reduced.not_finite:
                message += f" It is not finite on {ranks_in_words(reduced.not_finite)}."
            message += f" Previous best value was {_tensor(best):.3f}."
            return EarlyStoppingReason.NON_FINITE_METRIC, message
        if self.stopping_threshold is None and self.divergence_threshold is None:
            return None
        current, (better, sign) = reduced.value, MODES[self.mode]
        threshold = self.stopping_threshold
        if threshold is not None and better(current, threshold):
            message = f"Stopping threshold reached: {self.monitor} = {current} {sign} {threshold}."
            return EarlyStoppingReason.STOPPING_THRESHOLD, message
        threshold = self.divergence_threshold
        if threshold is not None and better(-current, -threshold):
            message = f"Divergence threshold reached: {self.monitor} = {current} {sign} {threshold}."
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, message
        return None

    def _improvement(self, current: Tensor, best: Tensor) -> str:
        best = best.to(current.device)
        if not torch.isfinite(best):
            return f"Metric {self.monitor} improved. New best score: {current:.3f}"
        return (
            f"Metric {self.monitor} improved by {abs(best - current):.3f} >="
            f" min_delta = {abs(self.min_delta)}. New best score: {current:.3f}"
        )


def _tensor(best: Tensor | Reduced) -> Tensor:
    return best.value if isinstance(best, Reduced) else best


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
    return Reduced(_rounded(number, dtype), dtype, tuple(not_finite), len(entries))


_SINGLE = struct.Struct("f")


def _rounded(number: float, dtype: torch.dtype) -> float:
    if dtype == torch.float32:
        return float(_SINGLE.unpack(_SINGLE.pack(number))[0])
    return number if dtype == torch.float64 else float(Reduced(number, dtype).value)


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
