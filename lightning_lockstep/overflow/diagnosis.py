"""What happens on one rank once something bad was found: run the batch again and say who did it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.numerics.module_values import NamePatterns
from lightning_lockstep.numerics.statistics import has_bad_values, tensor_statistics
from lightning_lockstep.overflow.frame_recorder import FrameRecorder
from lightning_lockstep.overflow.frames import Producer
from lightning_lockstep.overflow.remedy import Remedy, advice, search
from lightning_lockstep.overflow.replay import StepRecord, replay
from lightning_lockstep.overflow.report import Occasion, RankReport
from lightning_lockstep.overflow.settings import OverflowSettings

__all__ = ["Diagnosis", "talks_in_forward"]


def talks_in_forward(module: nn.Module, world_size: int) -> bool:
    """Return whether the model's own forward talks to other ranks, so that no rank may run it alone.

    Args:
        module: The model.
        world_size: Number of ranks.
    """
    return world_size > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())


@dataclass(frozen=True)
class Diagnosis:
    """Investigates one hit on one rank.

    Args:
        trainer: The Trainer.
        module: Its LightningModule.
        settings: What the detector was asked to do.
        communicator: Names this rank and host.

    Ranks: every rank runs it after a common hit; nothing is sent unless the model itself does.
    """

    trainer: Trainer
    module: LightningModule
    settings: OverflowSettings
    communicator: Communicator

    def hold(self, record: StepRecord, *, may_replay: bool = True) -> RankReport:
        """Run the recorded batch again under a recorder and report.

        Args:
            record: The step.
            may_replay: Whether running the model here does any harm.

        Returns:
            What was found on this rank.
        """
        trainer = self.trainer
        occasion = Occasion(trainer.current_epoch, trainer.global_step, record.batch_number, record.batch_idx)
        report = RankReport(self.communicator.rank, self.communicator.host, occasion)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        report.loss = None if record.loss is None else float(record.loss.sum()) / scale
        report.gradients = self._bad_gradients()
        report.optimizer = self._bad_optimizer_state()
        report.notes += record.notes
        if not may_replay:
            report.notes.append(
                "Not run again: the model talks to other ranks in its forward (SyncBatchNorm)."
            )
            return report
        recorder = self._recorder()
        try:
            loss = replay(trainer, self.module, record, recorder)
        except Exception as error:  # the diagnosis must not replace what it was called for
            report.notes.append(f"Running the batch again failed: {type(error).__name__}: {error}")
            loss = record.loss
        self._take_over(report, recorder)
        if not _same(loss, record.loss):
            report.notes.append(
                f"Run again, the loss was {loss} instead of {record.loss}: the step does not repeat itself exactly"
                " (a training_step with a memory, or operations that are not deterministic)."
            )
        report.remedy = self._remedy(report, record)
        return report

    def _recorder(self) -> FrameRecorder:
        settings = self.settings
        return FrameRecorder(
            self.module,
            max_frames=settings.max_frames_to_save,
            allow_inf=NamePatterns(settings.allow_inf),
            modules=None if settings.modules is None else NamePatterns(settings.modules),
            gradients=settings.gradients,
        )

    def _take_over(self, report: RankReport, recorder: FrameRecorder) -> None:
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
        worth = first.low_precision and first.kind not in ("weight", "batch")
        if worth and not talks_in_forward(self.module, self.communicator.world_size):
            try:
                found = search(self.module, first, lambda: self._producer_now(record))
            except Exception as error:  # a module may not accept float32; then there is no such remedy
                report.notes.append(f"The search for a remedy failed: {type(error).__name__}: {error}")
        if found is None:
            return Remedy(text=advice(first, finite_in_float32=False))
        return found

    def _producer_now(self, record: StepRecord) -> Producer | None:
        recorder = self._recorder()
        loss = replay(self.trainer, self.module, record, recorder)
        if recorder.producer is not None:
            return recorder.producer
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if recorder.backward_producer is not None and not scaled:
            return recorder.backward_producer
        if loss is not None and has_bad_values(loss):
            return Producer("code", "", type(self.module).__name__)
        return None

    def _bad_gradients(self) -> list[str]:
        lines = []
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and has_bad_values(parameter.grad):
                statistics = tensor_statistics(parameter.grad)
                assert statistics is not None
                lines.append(
                    f"{name}: {statistics.nan} nan, {statistics.inf} inf of {parameter.grad.numel()}"
                )
        return lines

    def _bad_optimizer_state(self) -> list[str]:
        names: dict[torch.Tensor, str] = {p: name for name, p in self.module.named_parameters()}
        lines = []
        for optimizer in self.trainer.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items() if isinstance(state, dict) else ():
                    if has_bad_values(value):
                        statistics = tensor_statistics(value)
                        assert statistics is not None
                        lines.append(
                            f"{key} of {names.get(parameter, '?')} ({type(optimizer).__name__}):"
                            f" {statistics.nan} nan, {statistics.inf} inf"
                        )
        return lines


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    a, b = one.detach().float().cpu(), other.detach().float().cpu()
    return a.shape == b.shape and torch.equal(a.nan_to_num(math.pi), b.nan_to_num(math.pi))
