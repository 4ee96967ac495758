"""What follows a hit: the report, and then raise, warn or skip, alike on every rank."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch.optim import Optimizer

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.errors import OverflowDetectedError
from lightning_lockstep.numerics.statistics import has_bad_values
from lightning_lockstep.overflow.detection.activation_watch import ActivationWatch
from lightning_lockstep.overflow.diagnosis.diagnose import Diagnosis
from lightning_lockstep.overflow.diagnosis.replay import StepRecord
from lightning_lockstep.overflow.report.contents import RankReport
from lightning_lockstep.overflow.report.publishing import ReportPublisher
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.steps.engines import EngineGradients

__all__ = ["Counters", "Response"]

_log = logging.getLogger(__name__)


@dataclass
class Counters:
    """What was counted so far; the same on every rank but for the reports."""

    skipped_steps: int = 0  # of the optimizer
    scaler_skips: int = 0  # ordinary ones of an fp16 loss scaler
    bad_in_a_row: int = 0  # optimizer steps with a hit since the last one without
    reports: list[RankReport] = field(default_factory=list)


@dataclass(frozen=True)
class Response:
    """Acts on hits."""

    trainer: Trainer
    module: LightningModule
    settings: OverflowSettings
    communicator: Communicator
    publisher: ReportPublisher
    watch: ActivationWatch | None  # of all activations, if there is one
    counters: Counters
    engine: EngineGradients | None = None  # keeps the gradients and makes the steps, if there is one

    def to_common_hit(self, optimizer: Optimizer, record: StepRecord) -> None:
        """Act on a hit that every rank knows of, at the same optimizer step; ``record`` is replayed."""
        why = self._why_alarm(record)
        if why is None:
            self.counters.scaler_skips += 1
            return
        self.counters.bad_in_a_row += 1
        in_a_row = self.counters.bad_in_a_row
        text = ""
        if in_a_row == 1:
            report = self._diagnose(record, all_ranks=True)
            text = self.publisher.publish(report, why, self.watch)
        if self.settings.action == "raise":
            raise OverflowDetectedError(text)
        if self.settings.action == "skip":
            self._skip(optimizer, record)
        elif in_a_row > 1 and in_a_row & (in_a_row - 1) == 0 and self.communicator.is_main:
            _log.warning("nan or inf in %d optimizer steps in a row; see the report above", in_a_row)

    def to_single_rank_hit(self, record: StepRecord) -> None:
        """Report what only this rank knows of, while the others go on."""
        if self.publisher.may_publish_single():
            self.publisher.publish_single(self._diagnose(record, all_ranks=False))

    def _diagnose(self, record: StepRecord, *, all_ranks: bool) -> RankReport:
        diagnosis = Diagnosis(
            self.trainer, self.module, self.settings, self.communicator, self.publisher.all_arrive
        )
        with self._unwatched():
            report = diagnosis.run(record, all_ranks=all_ranks)
        self.counters.reports.append(report)
        return report

    def _why_alarm(self, record: StepRecord) -> str | None:
        """Return why this is an alarm, the same on every rank; ``None`` for an ordinary skip of a loss scaler."""
        scaling = self._loss_scale()
        if scaling is None:
            return "the loss or the gradients are not finite"
        scale, floor = scaling
        bad = any(
            value is not None and has_bad_values(value) for value in (record.loss, record.activation_flag)
        )
        entries = self.publisher.collect({"forward": bad, "scale": scale}).entries.values()
        if any(entry["forward"] for entry in entries):
            return "the forward is not finite, which no loss scale can fix"
        lowest = min(entry["scale"] for entry in entries)
        if lowest <= max(floor, self.settings.scale_floor):
            return f"gradients are not finite although the loss scale is down to {lowest:g}"
        too_many = None if self.engine is None else self.engine.why_skips_are_too_many()
        return None if too_many is None else too_many.rstrip(".")

    def _loss_scale(self) -> tuple[float, float] | None:
        """Return the loss scale and its floor; ``None`` where the loss is not scaled."""
        if self.engine is not None:
            return self.engine.loss_scale()
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return None if scaler is None else (float(scaler.get_scale()), 0.0)

    def _skip(self, optimizer: Optimizer, record: StepRecord) -> None:
        """Skip this optimizer step: without gradients an optimizer changes nothing."""
        if self.engine is not None:
            self.engine.skip_step()
        else:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        counters = self.counters
        counters.skipped_steps += 1
        record.skipped = True
        if self.communicator.is_main:
            _log.warning(
                "optimizer step %d skipped because of nan or inf (%d so far, %d in a row)",
                self.trainer.global_step,
                counters.skipped_steps,
                counters.bad_in_a_row,
            )
        if counters.bad_in_a_row >= self.settings.max_skips:
            raise OverflowDetectedError(
                f"{counters.bad_in_a_row} optimizer steps in a row were skipped because of nan or inf, as many as"
                f" max_skips={self.settings.max_skips} allows. Reports are in {self.publisher.folder}."
            )

    def _unwatched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.paused()
