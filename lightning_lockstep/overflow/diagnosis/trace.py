"""Tracing chosen batches: all their frames, no detection."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.numerics.module_values import NamePatterns
from lightning_lockstep.overflow.diagnosis.frame_recorder import FrameRecorder
from lightning_lockstep.overflow.diagnosis.replay import StepRecord
from lightning_lockstep.overflow.report.publishing import ReportPublisher
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.steps.capabilities import capabilities_of

__all__ = ["BatchTrace"]


class BatchTrace:
    """Records every frame of chosen batches, the same on all ranks, in the training step itself."""

    def __init__(self, settings: OverflowSettings) -> None:
        self._settings = settings
        self._batches = frozenset(settings.trace_batch_nums)
        self._recorder: FrameRecorder | None = None

    @property
    def active(self) -> bool:
        """Whether the batch under way is traced."""
        return self._recorder is not None

    def context(self, module: LightningModule, record: StepRecord) -> AbstractContextManager[Any]:
        """Return the context for a training step; it records if this batch is to be traced."""
        if record.batch_number not in self._batches:
            return nullcontext()
        self._recorder = FrameRecorder(
            module,
            max_frames=None,
            allow_inf=NamePatterns(self._settings.allow_inf),
            modules=None if self._settings.modules is None else NamePatterns(self._settings.modules),
            gradients=False,
            divided=capabilities_of(module.trainer.strategy).replays == "together",
        )
        return self._recorder.recording()

    def finish(self, publisher: ReportPublisher, trainer: Trainer, record: StepRecord) -> None:
        """Print and write what was recorded in the batch that ended."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        rank, number = publisher.communicator.rank, record.batch_number
        where = f"rank {rank}, epoch {trainer.current_epoch}, step {trainer.global_step}"
        indent = " " * 17
        lines = [
            f"\n{indent} *** Starting batch number={number} *** ({where})",
            f"{'abs min':8} {'abs max':8} metadata",
            *(frame.text() for frame in recorder.frames),
            f"{indent} *** Finished batch number={number} ***\n",
        ]
        publisher.publish_trace(number, "\n".join(lines))
