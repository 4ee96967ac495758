"""What a hit leads to on one rank: the batch is replayed, and the report names the first bad value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.numerics.module_values import NamePatterns
from lightning_lockstep.numerics.statistics import has_bad_values, tensor_statistics
from lightning_lockstep.overflow.frame_recorder import FrameRecorder
from lightning_lockstep.overflow.frames import Producer
from lightning_lockstep.overflow.remedy import Remedy, advice, search
from lightning_lockstep.overflow.replay import StepRecord, replay
from lightning_lockstep.overflow.report import Occasion, RankReport
from lightning_lockstep.overflow.requirements import communicates_in_forward
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.steps.capabilities import missing_capabilities

__all__ = ["Diagnosis"]


@dataclass(frozen=True)
class Diagnosis:
    """Finds the origin of one hit on one rank.

    Args:
        trainer: The Trainer.
        module: Its LightningModule.
        settings: The detector's options.
        communicator: Of the run.
    """

    trainer: Trainer
    module: LightningModule
    settings: OverflowSettings
    communicator: Communicator

    def run(self, record: StepRecord, *, all_ranks: bool) -> RankReport:
        """Replay the recorded batch under a recorder and report what was found on this rank.

        Args:
            record: The step.
            all_ranks: Whether every rank runs its diagnosis now. Otherwise a model that communicates in its
                forward is not replayed.

        Ranks: nothing is sent unless the model itself communicates in its forward.
        """
        report = self._report(record)
        why_not = self._why_not_replayed(all_ranks)
        if why_not:
            report.notes.append(f"Not replayed: {why_not}.")
            return report
        recorder = self._recorder()
        try:
            loss = replay(self.trainer, self.module, record, recorder, all_ranks=all_ranks)
        except Exception as error:  # the diagnosis must not replace what it was called for
            report.notes.append(f"Replaying the batch failed: {type(error).__name__}: {error}")
            loss = record.loss
        self._add_findings(report, recorder, loss)
        if not _same(loss, record.loss):
            report.notes.append(
                f"The replayed loss was {_number(loss)}, not {_number(record.loss)}: the step is not deterministic"
                " (state kept in training_step, or nondeterministic operations)."
            )
        report.remedy = self._remedy(report, record)
        return report

    def _report(self, record: StepRecord) -> RankReport:
        """Return a report of what is known without a replay."""
        trainer = self.trainer
        occasion = Occasion(trainer.current_epoch, trainer.global_step, record.batch_number, record.batch_idx)
        report = RankReport(self.communicator.rank, self.communicator.host, occasion)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        report.loss = None if record.loss is None else float(record.loss.sum()) / scale
        report.gradients = self._bad_gradients()
        report.optimizer = self._bad_optimizer_state()
        report.notes += record.notes
        return report

    def _why_not_replayed(self, all_ranks: bool) -> str:
        missing = missing_capabilities(self.trainer.strategy, "step_alone")
        if missing:
            return f"on {type(self.trainer.strategy).__name__}, {missing[0]}"
        if not all_ranks and communicates_in_forward(self.module, self.communicator.world_size):
            return "the model communicates with other ranks in its forward (SyncBatchNorm)"
        return ""

    def _recorder(self) -> FrameRecorder:
        settings = self.settings
        return FrameRecorder(
            self.module,
            max_frames=settings.max_frames_to_save,
            allow_inf=NamePatterns(settings.allow_inf),
            modules=None if settings.modules is None else NamePatterns(settings.modules),
            gradients=settings.gradients,
        )

    def _add_findings(self, report: RankReport, recorder: FrameRecorder, loss: Tensor | None) -> None:
        loss_allowed = NamePatterns(self.settings.allow_inf).match("loss")
        report.clean = not (recorder.found_bad_values or has_bad_values(loss, allow_inf=loss_allowed))
        report.frames = list(recorder.frames)
        report.producer, report.propagators = recorder.producer, recorder.propagators
        if report.producer is not None:
            return
        report.backward_producer = recorder.backward_producer
        if report.backward_producer is not None:
            frames = list(recorder.backward_frames.values())
            bad = next(i for i, f in enumerate(frames) if f.module == report.backward_producer.module)
            report.backward_frames = frames[max(0, bad + 1 - self.settings.max_frames_to_save) : bad + 1]

    def _remedy(self, report: RankReport, record: StepRecord) -> Remedy:
        first = report.producer or report.backward_producer
        if first is None:
            return Remedy()
        found: Remedy | None = None
        may_help = first.low_precision and first.kind not in ("weight", "batch")
        if may_help and not communicates_in_forward(self.module, self.communicator.world_size):
            try:
                found = search(self.module, first, lambda: self._producer_now(record))
            except Exception as error:  # a module may not accept float32; then there is no such remedy
                report.notes.append(f"The search for a remedy failed: {type(error).__name__}: {error}")
        return found or Remedy(text=advice(first))

    def _producer_now(self, record: StepRecord) -> Producer | None:
        recorder = self._recorder()
        # How often a rank does this is its own affair, so the step must not communicate.
        loss = replay(self.trainer, self.module, record, recorder, all_ranks=False)
        if recorder.producer is not None:
            return recorder.producer
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if recorder.backward_producer is not None and not scaled:
            return recorder.backward_producer
        if loss is not None and has_bad_values(loss):
            return Producer("code", "", type(self.module).__name__)
        return None

    def _bad_gradients(self) -> list[str]:
        return [
            f"{name}: {_counts(parameter.grad)} of {parameter.grad.numel()}"
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None and has_bad_values(parameter.grad)
        ]

    def _bad_optimizer_state(self) -> list[str]:
        names: dict[Tensor, str] = {p: name for name, p in self.module.named_parameters()}
        return [
            f"{key} of {names.get(parameter, '?')} ({type(optimizer).__name__}): {_counts(value)}"
            for optimizer in self.trainer.optimizers
            for parameter, state in optimizer.state.items()
            for key, value in (state.items() if isinstance(state, dict) else ())
            if has_bad_values(value)
        ]


def _counts(tensor: Tensor) -> str:
    statistics = tensor_statistics(tensor)
    assert statistics is not None
    return f"{statistics.nan} nan, {statistics.inf} inf"


def _number(loss: Tensor | None) -> str:
    return "none" if loss is None else f"{float(loss.sum()):.8g}"


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    a, b = one.detach().float().cpu(), other.detach().float().cpu()
    return a.shape == b.shape and torch.equal(a.nan_to_num(math.pi), b.nan_to_num(math.pi))
