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
from lightning_lockstep.overflow.activation_watch import ActivationWatch
from lightning_lockstep.overflow.diagnosis import Diagnosis, talks_in_forward
from lightning_lockstep.overflow.publishing import Sharing
from lightning_lockstep.overflow.replay import StepRecord
from lightning_lockstep.overflow.report import RankReport
from lightning_lockstep.overflow.settings import OverflowSettings

__all__ = ["Response", "Tally"]

_log = logging.getLogger(__name__)


@dataclass
class Tally:
    """What was counted so far; the same on every rank but for the reports.

    Attributes:
        skipped_steps: Optimizer steps left out.
        scaler_skips: Ordinary skips of an fp16 loss scaler.
        bad_in_a_row: Optimizer steps with a hit since the last one without.
        reports: This rank's reports.
    """

    skipped_steps: int = 0
    scaler_skips: int = 0
    bad_in_a_row: int = 0
    reports: list[RankReport] = field(default_factory=list)


@dataclass(frozen=True)
class Response:
    """Acts on hits.

    Args:
        settings: What the detector was asked to do.
        communicator: Of the run.
        sharing: Brings the ranks' findings together.
        watch: The live hooks, if there are any.
        tally: Counters to keep.
    """

    settings: OverflowSettings
    communicator: Communicator
    sharing: Sharing
    watch: ActivationWatch | None
    tally: Tally

    def common_hit(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer, record: StepRecord
    ) -> None:
        """Act on a hit that every rank knows of.

        Args:
            trainer: The Trainer.
            module: Its LightningModule.
            optimizer: The one about to step.
            record: The step to run again.

        Raises:
            OverflowDetectedError: ``action="raise"``, or too many steps were skipped.

        Ranks: all, at the same optimizer step; findings go over the side channel.
        """
        why = self._alarm(trainer, record)
        if why is None:
            self.tally.scaler_skips += 1
            return
        self.tally.bad_in_a_row += 1
        in_a_row = self.tally.bad_in_a_row
        head = ""
        if in_a_row == 1:
            with self._unwatched():
                report = Diagnosis(trainer, module, self.settings, self.communicator).hold(record)
            self.tally.reports.append(report)
            head = self.sharing.publish(report, why, self.watch)
        if self.settings.action == "raise":
            raise OverflowDetectedError(head)
        if self.settings.action == "skip":
            self._skip(trainer, optimizer, record)
        elif in_a_row > 1 and in_a_row & (in_a_row - 1) == 0 and self.communicator.is_main:
            _log.warning("nan or inf in %d optimizer steps in a row; see the report above", in_a_row)

    def lone_hit(self, trainer: Trainer, module: LightningModule, record: StepRecord) -> None:
        """Report what only this rank knows of, while the others go on.

        Args:
            trainer: The Trainer.
            module: Its LightningModule.
            record: The step to run again.

        Ranks: any rank, alone; one message to rank 0, and nobody waits.
        """
        if self.sharing.said_alone():
            return
        may_replay = not talks_in_forward(module, self.communicator.world_size)
        with self._unwatched():
            diagnosis = Diagnosis(trainer, module, self.settings, self.communicator)
            report = diagnosis.hold(record, may_replay=may_replay)
        self.tally.reports.append(report)
        self.sharing.publish_alone(report)

    def _alarm(self, trainer: Trainer, record: StepRecord) -> str | None:
        """Return why this is an alarm; ``None`` for an ordinary skip of a loss scaler. Alike on every rank."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is None:
            return "the loss or the gradients are not finite"
        bad = any(value is not None and has_bad_values(value) for value in (record.loss, record.seen))
        facts = self.sharing.hear({"forward": bad, "scale": float(scaler.get_scale())})
        if any(said["forward"] for said in facts.values()):
            return "the forward is not finite, which no loss scale can mend"
        lowest = min(said["scale"] for said in facts.values())
        if lowest <= self.settings.scale_floor:
            return f"gradients are not finite though the loss scale is down to {lowest:g}"
        return None

    def _skip(self, trainer: Trainer, optimizer: Optimizer, record: StepRecord) -> None:
        """Leave this optimizer step out: without gradients an optimizer changes nothing."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        tally = self.tally
        tally.skipped_steps += 1
        record.skipped = True
        if self.communicator.is_main:
            _log.warning(
                "optimizer step %d left out (%d so far, %d in a row)",
                trainer.global_step,
                tally.skipped_steps,
                tally.bad_in_a_row,
            )
        if tally.bad_in_a_row >= self.settings.max_skips:
            raise OverflowDetectedError(
                f"{tally.bad_in_a_row} optimizer steps in a row were left out because of nan or inf, which is as"
                f" many as max_skips allows; reports are in {self.sharing.folder}."
            )

    def _unwatched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.paused()
