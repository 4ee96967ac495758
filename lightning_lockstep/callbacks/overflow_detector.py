"""OverflowDetector: finds the module, rank and batch that produced the first nan or infinity."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep._settings import settings_of
from lightning_lockstep.callbacks.ends_with_run import EndsWithRun
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import LockstepError, OverflowDetectedError
from lightning_lockstep.overflow.detect import Detection
from lightning_lockstep.overflow.diagnose import BadStepDiagnosis
from lightning_lockstep.overflow.replay import StepRecord
from lightning_lockstep.overflow.report import RankReport, ReportPublisher
from lightning_lockstep.overflow.settings import Action, Mode, OverflowSettings, refuse_strategy

_log = logging.getLogger(__name__)


class OverflowDetector(EndsWithRun):
    """Finds the module, rank and batch that produced the first nan or infinity.

    Each step checks the loss and the reduced gradients. If they hold a bad value, and before weights change,
    each rank replays its batch under hooks, and a report names the module that produced it.

    Args:
        max_frames_to_save: Frames printed up to the first bad one.
        trace_batch_nums: Batches (from 0, over all epochs) whose frames are all printed; detection is off for these.
        abort_after_batch_num: Batch after which the run is ended with a :class:`~lightning_lockstep.LockstepError`.
        mode: ``"replay"`` checks loss and gradients only; ``"hooks"`` also every activation of every step, for
            overflows that reach neither.
        action: ``"raise"`` ends the run on all ranks; ``"warn"`` reports and goes on; ``"skip"`` skips this
            optimizer step on all ranks and gives up after ``max_skips`` in a row.
        gradients: Whether to check gradients, and not the loss alone.
        allow_inf: Patterns of values that may be infinite, such as ``*.mask*``.
        modules: Patterns of the modules to check; ``None`` for all.
        report_dir: Folder for the reports, which then get a picture too (needs matplotlib); by default the
            folder ``overflow`` in the run's log folder, without a picture.
        max_skips: For ``"skip"``: how many in a row.
        check_every_n_steps: Optimizer steps between two checks. ``None``: each step; every 10 on XLA devices, because
            each check makes them wait. The batches since the last check are kept, and the first with a bad loss or
            activation is replayed with the weights of the later step.
        scale_floor: Loss scale at or below which an overflow of scaled gradients is an alarm.
        timeout: Longest wait for the other ranks' findings after a hit [s].

    Attributes:
        skipped_steps: Optimizer steps skipped so far.
        scaler_skips: Ordinary skips of an fp16 loss scaler so far; they are not alarms.
        reports: Reports of this rank so far.

    Raises:
        ConfigurationError: One message with every option that cannot be used.

    Ranks: every rank has one. A step without a hit sends nothing, or 4 bytes with ``action="warn"``, with
    ``gradients=False``, and if an engine divides the gradients among the ranks; after a hit each rank sends its
    findings over the side channel.
    """

    def __init__(
        self,
        *,
        max_frames_to_save: int = 21,
        trace_batch_nums: Sequence[int] = (),
        abort_after_batch_num: int | None = None,
        mode: Mode = "replay",
        action: Action = "raise",
        gradients: bool = True,
        allow_inf: Sequence[str] = (),
        modules: Sequence[str] | None = None,
        report_dir: str | Path | None = None,
        max_skips: int = 10,
        check_every_n_steps: int | None = None,
        scale_floor: float = 1.0,
        timeout: float = 300.0,
    ) -> None:
        super().__init__()
        self.settings = settings_of(OverflowSettings, locals())
        self.skipped_steps = self.scaler_skips = 0
        self.reports: list[RankReport] = []
        self._bad_in_a_row = 0  # optimizer steps with a bad value since the last one without
        self._has_skipped = False  # an optimizer step of the current batch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy that cannot work, and open the side channel while all ranks are here."""
        if stage == "fit":
            self.at_end.close()
            refuse_strategy(trainer)
            _ = current_communicator().side_channel

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the detection in place."""
        usual = Path(trainer.log_dir or trainer.default_root_dir, "overflow")
        folder = Path(self.settings.report_dir or usual)
        self._publisher = ReportPublisher(current_communicator(), folder, self.settings)
        self.at_end.callback(self._publisher.close)
        self._detection = Detection(trainer, pl_module, self._publisher)
        self.at_end.callback(delattr, self, "_detection")  # it keeps batches
        self.at_end.callback(self._detection.remove)
        self._diagnosis = BadStepDiagnosis(trainer, pl_module, self._publisher, self._detection.gradients)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss, and let a bad one reach every rank."""
        self._detection.before_backward(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch activations again."""
        self._detection.after_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check, and act on a hit before the weights change."""
        has_looked, origin = self._detection.before_optimizer_step(optimizer)
        if origin is not None:
            self._respond(trainer, optimizer, origin)
        elif has_looked:
            self._bad_in_a_row = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Release the batch; end the run if it was the last one that was asked for."""
        self._detection.batch_end()
        if self._has_skipped:
            self._has_skipped = False
            pl_module.log("overflow_skipped_steps", float(self.skipped_steps))
        last, number = self.settings.abort_after_batch_num, trainer.fit_loop.epoch_loop.total_batch_idx
        if last is not None and number >= last:
            self._look_at_the_rest(trainer)
            raise LockstepError(
                f"OverflowDetector: aborting after batch {number}, as abort_after_batch_num={last} asks."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the values that have not been read yet, and remove everything."""
        with self.at_end:
            self._look_at_the_rest(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {"skipped_steps": self.skipped_steps, "scaler_skips": self.scaler_skips}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counters."""
        self.skipped_steps = state_dict["skipped_steps"]
        self.scaler_skips = state_dict["scaler_skips"]

    def _look_at_the_rest(self, trainer: Trainer) -> None:
        if (origin := self._detection.end()) is not None:
            self._respond(trainer, trainer.optimizers[0], origin)

    def _respond(self, trainer: Trainer, optimizer: Optimizer, origin: StepRecord) -> None:
        """Report a bad value that all ranks know of, at the same optimizer step; then raise, warn or skip."""
        text = ""
        with self._detection.paused():
            why = self._diagnosis.why_alarm(origin)
            if why is None:
                self.scaler_skips += 1
                return
            self._bad_in_a_row += 1
            if self._bad_in_a_row == 1:
                report = self._diagnosis.report(origin)
                self.reports.append(report)
                text = self._publisher.publish(report, why)
        times = self._bad_in_a_row
        if self.settings.action == "raise":
            raise OverflowDetectedError(text)
        if self.settings.action == "skip":
            self._skip(trainer, optimizer)
        elif times > 1 and times & (times - 1) == 0 and trainer.is_global_zero:
            _log.warning("nan or inf in %d optimizer steps in a row; see the report above", times)

    def _skip(self, trainer: Trainer, optimizer: Optimizer) -> None:
        self._detection.gradients.skip_step(optimizer)
        self.skipped_steps += 1
        self._has_skipped = True
        if trainer.is_global_zero:
            _log.warning(
                "optimizer step %d skipped because of nan or inf (%d so far, %d in a row)",
                trainer.global_step,
                self.skipped_steps,
                self._bad_in_a_row,
            )
        if self._bad_in_a_row >= self.settings.max_skips:
            raise OverflowDetectedError(
                f"{self._bad_in_a_row} optimizer steps in a row were skipped because of nan or inf, as many as"
                f" max_skips={self.settings.max_skips} allows. Reports are in {self._publisher.folder}."
            )
