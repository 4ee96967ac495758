"""Early stopping on which all ranks agree."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_lockstep._lightning import EarlyStopping
from lightning_lockstep._settings import Faults, did_you_mean, plain_number
from lightning_lockstep._text import ranks_in_words
from lightning_lockstep._trainer import faults_as_lightnings
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import MetricMissingError

# -- One value of those of all ranks, from numbers alone: no Trainer, no ranks --

Reduction = Literal["mean", "min", "max", "rank0"]


class Entry(NamedTuple):
    """What one rank knows of the monitored metric."""

    value: float | None  # None: the rank has not logged it
    dtype: torch.dtype = torch.float32  # of the metric
    names: Sequence[str] = ()  # what the rank has logged, if the metric is not among it


def reduce_entries(entries: Sequence[Entry], how: Reduction) -> tuple[Tensor, tuple[int, ...]]:
    """Return one value, in the dtype of the metric, and the ranks whose value took part and is nan or infinite."""
    # The entries are in rank order, and at least one has a value; ``rank0`` takes that of the lowest such rank.
    values = {rank: entry.value for rank, entry in enumerate(entries) if entry.value is not None}
    first = min(values)
    if how == "rank0":
        values = {first: values[first]}
    numbers = torch.tensor([*values.values()], dtype=torch.float64)
    reduced = {"min": numbers.min, "max": numbers.max}.get(how, numbers.mean)()  # nan if any of them is
    dtype = entries[first].dtype
    if how == "mean" and len(values) > 1 and not dtype.is_floating_point:
        dtype = torch.float32
    not_finite = tuple(rank for rank, value in values.items() if not math.isfinite(value))
    return reduced.to(dtype), not_finite


def missing_message(monitor: str, entries: Sequence[Entry]) -> str:
    """Return the text for a metric that some ranks, or all, have not logged; the same on every rank."""
    names = list(dict.fromkeys(name for entry in entries for name in entry.names))
    absent = [rank for rank, entry in enumerate(entries) if entry.value is None]
    if len(absent) == len(entries):
        return (
            f"Early stopping conditioned on metric `{monitor}` which is not available."
            " Pass in or modify your `EarlyStopping` callback to use any of the following:"
            f" `{'`, `'.join(names)}`.{did_you_mean(monitor, names)}"
        )
    present = [rank for rank in range(len(entries)) if rank not in absent]
    return (
        f"Early stopping monitors `{monitor}`, which is logged by {ranks_in_words(present)} and not by"
        f" {ranks_in_words(absent)}. Log it on every rank, or pass missing='use_present' to decide"
        " from the ranks that have it."
    )


# -- SyncedEarlyStopping: one decision for all ranks --


class SyncedEarlyStopping(EarlyStopping):
    """Lightning's ``EarlyStopping``, with one decision for all ranks.

    Arguments up to ``log_rank_zero_only`` are Lightning's, as are attributes, messages and ``state_dict``;
    checkpoints of the two can be exchanged, and a Trainer takes only one of the two for a metric.

    Args:
        monitor: Name of the metric.
        min_delta: Least change that counts as an improvement.
        patience: Checks without an improvement after which to stop; ``math.inf``: never.
        verbose: Whether improvements and the stop are logged.
        mode: ``min`` or ``max``: which way is better.
        strict: Whether a metric that no rank has is an error.
        check_finite: Whether nan or an infinity on a rank stops.
        stopping_threshold: Stop once the value is better than this.
        divergence_threshold: Stop once the value is worse than this.
        check_on_train_epoch_end: Whether to check after the training epoch rather than after validation.
        log_rank_zero_only: Changes nothing here: the message is the same on all ranks, and rank 0 alone logs it.
        reduce: How the values of all ranks are reduced to one: ``mean``, ``min``, ``max`` or ``rank0``.
        missing: What to do if only some ranks have the metric: ``error``, or ``use_present`` to decide
            from those that have it.

    Raises:
        ConfigurationError: One message with every argument that cannot be used.
        MetricMissingError: The metric is missing; raised on every rank.

    Source: https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.EarlyStopping.html

    Ranks: every rank has one. A check is one gather of a few bytes.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
        *,
        reduce: Reduction = "mean",
        missing: Literal["error", "use_present"] = "error",
    ) -> None:
        faults = Faults()
        is_name = isinstance(monitor, str) and bool(monitor)
        faults.check(is_name, "monitor", monitor, "the name of a logged metric, such as 'val_loss'")
        min_delta, patience = plain_number(min_delta), plain_number(patience)
        faults.number("min_delta", min_delta, such_as=0.001)
        if patience != math.inf:
            faults.whole("patience", patience, least=0, what="a whole number of checks", such_as=3)
        faults.choice("mode", mode, tuple(self.mode_dict))
        faults.choice("reduce", reduce, ("mean", "min", "max", "rank0"))
        faults.choice("missing", missing, ("error", "use_present"))
        with faults_as_lightnings():
            faults.raise_all()
        super().__init__(
            monitor=monitor,
            min_delta=min_delta,
            patience=patience,
            verbose=verbose,
            mode=mode,
            strict=strict,
            check_finite=check_finite,
            stopping_threshold=stopping_threshold,
            divergence_threshold=divergence_threshold,
            check_on_train_epoch_end=check_on_train_epoch_end,
            log_rank_zero_only=log_rank_zero_only,
        )
        self.reduce, self.missing = reduce, missing

    @property
    def state_key(self) -> str:
        """The key of Lightning's callback, so that either one loads the other's state; a subclass has its own."""
        if type(self) is not SyncedEarlyStopping:
            return super().state_key
        return f"EarlyStopping{ {'monitor': self.monitor, 'mode': self.mode}!r}"

    def _run_early_stopping_check(self, trainer: Any) -> None:
        if trainer.fast_dev_run:
            return
        metrics = trainer.callback_metrics
        metric = metrics.get(self.monitor)
        own = Entry(None, names=list(metrics)) if metric is None else Entry(float(metric), metric.dtype)
        self._check(trainer, current_communicator().gather(own))

    def _check(self, trainer: Any, entries: Sequence[Entry]) -> None:
        """Decide from the entries of all ranks, which are the same on every rank."""
        absent = sum(entry.value is None for entry in entries)
        nobody_has_it = absent == len(entries)
        if (nobody_has_it and self.strict) or (0 < absent < len(entries) and self.missing == "error"):
            raise MetricMissingError(missing_message(self.monitor, entries))
        if nobody_has_it:
            if self.verbose and trainer.is_global_zero:
                warnings.warn(missing_message(self.monitor, entries), RuntimeWarning, stacklevel=2)
            return
        value, not_finite = reduce_entries(entries, self.reduce)
        if not_finite and self.check_finite:  # this ends the fit, whatever the values of the other ranks are
            value = torch.tensor(entries[not_finite[0]].value)
        stop, message = self._evaluate_stopping_criteria(value)  # Lightning's, or that of a subclass
        if not_finite and self.check_finite and message and len(entries) > 1:
            message += f" It is not finite on {ranks_in_words(not_finite)}."
        if stop:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = message
        if message and self.verbose:  # the message is the same on all ranks, so it is logged once
            self._log_info(trainer, message, log_rank_zero_only=True)
