"""Early stopping on which all ranks agree."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_lockstep._lightning import EarlyStopping
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.side_channel.delayed_gather import DelayedGather
from lightning_lockstep.errors import ConfigurationError, MetricMissingError
from lightning_lockstep.stopping.early_stopping_rule import (
    MISSING,
    MODES,
    REDUCTIONS,
    Entry,
    Progress,
    Reduced,
    StopRule,
    Verdict,
    missing_message,
    reduce_entries,
)
from lightning_lockstep.stopping.step_metric import StepMetric

__all__ = ["SyncedEarlyStopping"]

_log = logging.getLogger(__name__)
_watches = itertools.count()
# Longest wait for a rank's value [s], that of torch's process groups: another rank may be busy with something
# that it alone does, such as writing a large checkpoint.
_PATIENCE = 1800.0


class SyncedEarlyStopping(EarlyStopping):
    """Lightning's ``EarlyStopping``, decided once from what every rank has.

    Every rank first tells whether it has the metric and what it is; one value is made of that, and one
    decision, so that decision, reason, ``wait_count`` and ``best_score`` are the same on every rank. A metric
    that only some ranks have is one error on all of them, not a hang.

    Arguments up to ``log_rank_zero_only`` are Lightning's, as are attributes, messages and ``state_dict``;
    checkpoints of the two can be exchanged.

    Args:
        monitor: Name of the metric.
        min_delta: Least change that counts as an improvement.
        patience: Checks without an improvement after which to stop.
        verbose: Whether improvements and the stop are logged.
        mode: ``min`` or ``max``: which way is better.
        strict: Whether a metric that no rank has is an error.
        check_finite: Whether nan or an infinity on a rank stops.
        stopping_threshold: Stop once the value is better than this.
        divergence_threshold: Stop once the value is worse than this.
        check_on_train_epoch_end: Whether to check after the training epoch rather than after validation.
        log_rank_zero_only: Whether only rank 0 logs.
        reduce: How one value is made of those of all ranks: ``mean``, ``min``, ``max`` or ``rank0``.
        missing: What to do when only some ranks have the metric: ``error``, or ``use_present`` to decide
            from those that have it.
        check_every_n_steps: Check the metric at every n-th optimizer step of training instead. The values
            travel while training goes on, and are read one step later: all ranks stop after the same batch.

    Raises:
        ConfigurationError: One message with every argument that cannot be used.
        MetricMissingError: The metric is missing; on every rank alike.

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
        faults = _faults(monitor, min_delta, patience, mode, reduce, missing, check_every_n_steps)
        if faults:
            raise ConfigurationError(faults)
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
        self._watch: StepMetric | None = None
        self._trainer: Any = None

    _best: Tensor | Reduced

    @property
    def best_score(self) -> Tensor:
        """Best value so far, a tensor without dimensions as Lightning's is."""
        return self._best.value if isinstance(self._best, Reduced) else self._best

    @best_score.setter
    def best_score(self, best: Tensor) -> None:
        self._best = best

    @property
    def state_key(self) -> str:
        """The key of Lightning's callback, so that either one loads the other's state."""
        return f"EarlyStopping{ {'monitor': self.monitor, 'mode': self.mode}!r}"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Get ready for a run.

        Ranks: all, together.
        """
        super().setup(trainer, pl_module, stage)
        communicator = current_communicator()
        if self.check_every_n_steps is None or stage != "fit":
            return
        self._stop_watching()
        gather = DelayedGather(
            communicator.side_channel, name=f"early_stopping/{next(_watches)}", timeout=_PATIENCE
        )
        self._watch = StepMetric(gather, self.check_every_n_steps)
        self._trainer = trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count steps where the run begins, which after a resume is not 0."""
        if self._watch is not None:
            self._watch.begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Post this rank's value and decide on the one of the step before.

        Ranks: every rank.
        """
        if self._watch is None or trainer.fast_dev_run:
            return
        for entries in self._watch.after_batch(trainer.global_step, lambda: self._look(trainer)):
            self._check(trainer, entries)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Check, or decide on what is still under way.

        Ranks: all, together.
        """
        if self._watch is None:
            super().on_train_epoch_end(trainer, pl_module)
        else:
            self._drain()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Check unless that is done after the training epoch, or inside it.

        Ranks: all, together.
        """
        if self._watch is None:
            super().on_validation_end(trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop listening.

        Ranks: any rank, alone.
        """
        if stage == "fit":
            self._stop_watching()

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's state, with every check that is under way taken into account.

        Ranks: all, together, as a checkpoint is saved.
        """
        self._drain()
        return super().state_dict()

    def _run_early_stopping_check(self, trainer: Any) -> None:
        if trainer.fast_dev_run:
            return
        mine = Entry.of(*self._look(trainer))
        self._check(trainer, [Entry.unpack(packed) for packed in current_communicator().gather(mine.pack())])

    def _look(self, trainer: Any) -> tuple[Tensor | None, list[str]]:
        metric = _logged_in_this_step(trainer, self.monitor) if self._watch is not None else None
        if metric is None:
            metrics = trainer.callback_metrics
            metric = metrics.get(self.monitor)
        if metric is None:
            return None, list(metrics)
        return metric.squeeze() if metric.dim() else metric, []

    def _check(self, trainer: Any, entries: Sequence[Entry]) -> None:
        """Decide from what all ranks have; all of them are here with the same entries."""
        absent = [rank for rank, (value, *_) in enumerate(entries) if value is None]
        if len(absent) == len(entries) and not self.strict:
            if self.verbose and trainer.is_global_zero:
                warnings.warn(missing_message(self.monitor, entries), RuntimeWarning, stacklevel=2)
            return
        if len(absent) == len(entries) or (absent and self.missing == "error"):
            raise MetricMissingError(missing_message(self.monitor, entries))
        verdict = self._decide(reduce_entries(entries, self.reduce), tells=self.verbose)
        if verdict.stop:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = verdict.message
        if verdict.message and self.verbose:
            self._log_info(trainer, verdict.message, self.log_rank_zero_only)

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        verdict = self._decide(Reduced(float(current), current.dtype))
        return verdict.stop, verdict.message

    def _decide(self, reduced: Reduced, *, tells: bool = True) -> Verdict:
        # Made anew each time, since Lightning's attributes may be set at any time.
        rule = StopRule(
            self.monitor,
            self.mode,
            self.min_delta,
            self.patience,
            self.check_finite,
            self.stopping_threshold,
            self.divergence_threshold,
        )
        verdict = rule.decide(Progress(self._best, self.wait_count), reduced, tells=tells)
        self._best, self.wait_count = verdict.progress
        if verdict.stop:
            self.stopping_reason = verdict.reason
        return verdict

    def _drain(self) -> None:
        if self._watch is not None and self._trainer is not None:
            under_way = self._watch.drain()
            # A check that was posted as the ranks decided to stop has nothing more to say.
            for entries in under_way if not self._trainer.should_stop else []:
                self._check(self._trainer, entries)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.gather.close()
        self._watch = self._trainer = None


def _logged_in_this_step(trainer: Any, name: str) -> Tensor | None:
    """Return what ``callback_metrics`` would, without its walk over everything that was logged.

    Only for the plain case, a tensor that ``training_step`` logs at every step; otherwise ``None``.
    """
    results: Any = getattr(trainer.fit_loop.epoch_loop, "_results", {})
    result = results.get(f"training_step.{name}")
    if result is None or result.has_reset or not result.meta.on_step or not results.training:
        return None
    value = result._forward_cache
    return value.detach() if isinstance(value, Tensor) else None


def _faults(
    monitor: object,
    min_delta: object,
    patience: object,
    mode: object,
    reduce: object,
    missing: object,
    k: object,
) -> list[str]:
    faults = []
    if not isinstance(monitor, str) or not monitor:
        faults.append(f"monitor={monitor!r}: expected the name of a logged metric, such as 'val_loss'.")
    if not _is_number(min_delta) or not torch.isfinite(torch.tensor(float(min_delta))) or min_delta < 0:  # type: ignore[arg-type,operator]
        faults.append(f"min_delta={min_delta!r}: expected a finite number from 0, such as 0.001.")
    if not isinstance(patience, int) or isinstance(patience, bool) or patience < 0:
        faults.append(f"patience={patience!r}: expected a whole number of checks from 0, such as 3.")
    for name, given, choices in (
        ("mode", mode, tuple(MODES)),
        ("reduce", reduce, REDUCTIONS),
        ("missing", missing, MISSING),
    ):
        if given not in choices:
            faults.append(f"{name}={given!r}: expected one of {', '.join(map(repr, choices))}.")
    if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
        faults.append(f"check_every_n_steps={k!r}: expected a whole number of steps from 1, or None.")
    return faults


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)
