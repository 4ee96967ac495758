"""Early stopping on which all ranks agree."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_lockstep._lightning import EarlyStopping
from lightning_lockstep._settings import Faults, plain_number
from lightning_lockstep._text import ranks_in_words
from lightning_lockstep._trainer import faults_as_lightnings
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.stopping.early_stopping import (
    MISSING,
    REDUCTIONS,
    Entry,
    StepMetric,
    combine,
    missing_message,
)

_numbers = itertools.count()


class SyncedEarlyStopping(EarlyStopping):
    """Lightning's ``EarlyStopping``, with one decision for all ranks.

    Every rank sends whether it has the metric, and its value. They are reduced to one value and one decision,
    so that decision, reason, ``wait_count`` and ``best_score`` are the same on every rank. A metric that only
    some ranks have raises the same error on all of them; it does not hang.

    Arguments up to ``log_rank_zero_only`` are Lightning's, as are attributes, messages and ``state_dict``;
    checkpoints of the two can be exchanged.

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
        missing: What to do when only some ranks have the metric: ``error``, or ``use_present`` to decide
            from those that have it.
        check_every_n_steps: Check the metric at every n-th optimizer step of training instead. The values
            travel while training goes on, and are read one step later: all ranks stop after the same batch.

    Raises:
        ConfigurationError: One message with every argument that cannot be used.
        MetricMissingError: The metric is missing; raised on every rank.

    Source: https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.EarlyStopping.html

    Ranks: every rank has one. A check after an epoch is one gather of a few bytes; with
    ``check_every_n_steps`` it is a message to rank 0 and one back, off the main thread, and no collective.
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
        reduce: Literal["mean", "min", "max", "rank0"] = "mean",
        missing: Literal["error", "use_present"] = "error",
        check_every_n_steps: int | None = None,
    ) -> None:
        faults = Faults()
        is_name = isinstance(monitor, str) and bool(monitor)
        faults.check(is_name, "monitor", monitor, "the name of a logged metric, such as 'val_loss'")
        min_delta, patience = plain_number(min_delta), plain_number(patience)
        faults.number("min_delta", min_delta, such_as=0.001)
        if patience != math.inf:
            faults.whole("patience", patience, least=0, what="a whole number of checks", such_as=3)
        faults.choice("mode", mode, tuple(self.mode_dict))
        faults.choice("reduce", reduce, REDUCTIONS)
        faults.choice("missing", missing, MISSING)
        what = "a whole number of optimizer steps"
        faults.whole("check_every_n_steps", check_every_n_steps, what=what, optional=True)
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
        self.check_every_n_steps = check_every_n_steps
        self._step_metric: StepMetric | None = None
        self._trainer: Any = None

    @property
    def state_key(self) -> str:
        """The key of Lightning's callback, so that either one loads the other's state; a subclass has its own."""
        if type(self) is not SyncedEarlyStopping:
            return super().state_key
        return f"EarlyStopping{ {'monitor': self.monitor, 'mode': self.mode}!r}"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepare for a run. Ranks: all, together."""
        super().setup(trainer, pl_module, stage)
        communicator = current_communicator()
        if self.check_every_n_steps is None or stage != "fit":
            return
        self._close()
        name = f"early_stopping/{next(_numbers)}"
        self._step_metric = StepMetric(communicator.side_channel, name, every=self.check_every_n_steps)
        self._trainer = trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count steps where the run begins, which after a resume is not 0."""
        if self._step_metric is not None:
            self._step_metric.begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Post this rank's value and decide on the one of the step before. Ranks: every rank."""
        if self._step_metric is None or trainer.fast_dev_run:
            return
        for entries in self._step_metric.after_batch(trainer.global_step, lambda: self._read(trainer)):
            self._check(trainer, entries)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Check, or decide on the values that are still in flight. Ranks: all, together."""
        if self._step_metric is None:
            super().on_train_epoch_end(trainer, pl_module)
        else:
            self._drain()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Check unless that is done after the training epoch, or inside it. Ranks: all, together."""
        if self._step_metric is None:
            super().on_validation_end(trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop receiving values of other ranks."""
        if stage == "fit":
            self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's state, with every check that is in flight taken into account.

        Ranks: all, together, as a checkpoint is saved.
        """
        self._drain()
        return super().state_dict()

    def _run_early_stopping_check(self, trainer: Any) -> None:
        if trainer.fast_dev_run:
            return
        self._check(trainer, current_communicator().gather(Entry.of(*self._read(trainer))))

    def _read(self, trainer: Any) -> tuple[Tensor | None, list[str]]:
        metric = _logged_in_this_step(trainer, self.monitor) if self._step_metric is not None else None
        if metric is None:
            metrics = trainer.callback_metrics
            metric = metrics.get(self.monitor)
        if metric is None:
            return None, list(metrics)
        return metric.squeeze() if metric.dim() else metric, []

    def _check(self, trainer: Any, entries: Sequence[Entry]) -> None:
        """Decide from what all ranks have; all of them are here with the same entries."""
        reduced = combine(
            entries, monitor=self.monitor, how=self.reduce, missing=self.missing, strict=self.strict
        )
        if reduced is None:
            if self.verbose and trainer.is_global_zero:
                warnings.warn(missing_message(self.monitor, entries), RuntimeWarning, stacklevel=2)
            return
        value = reduced.value
        not_finite = reduced.not_finite if self.check_finite else ()
        if not_finite:  # it stops, whatever the others have
            value = torch.tensor(entries[not_finite[0]].value)
        stop, message = self._evaluate_stopping_criteria(value)  # Lightning's, or that of a subclass
        if not_finite and message and len(entries) > 1:
            message += f" It is not finite on {ranks_in_words(not_finite)}."
        if stop:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = message
        if message and self.verbose:  # the same on all ranks, so that once is enough
            self._log_info(trainer, message, log_rank_zero_only=True)

    def _drain(self) -> None:
        if self._step_metric is not None and self._trainer is not None:
            in_flight = self._step_metric.drain()
            # A check that was posted as the ranks decided to stop changes nothing any more.
            for entries in in_flight if not self._trainer.should_stop else []:
                self._check(self._trainer, entries)

    def _close(self) -> None:
        if self._step_metric is not None:
            self._step_metric.close()
        self._step_metric = self._trainer = None


def _logged_in_this_step(trainer: Any, name: str) -> Tensor | None:
    """Return what ``callback_metrics`` would for a tensor that ``training_step`` logs at every step."""
    # ``callback_metrics`` goes through everything that was logged, which costs more than a check of one metric.
    results: Any = trainer.fit_loop.epoch_loop._results
    result = results.get(f"training_step.{name}")
    if result is None or result.has_reset or not result.meta.on_step or not results.training:
        return None
    value = result._forward_cache
    return value.detach() if isinstance(value, Tensor) else None
