"""What detecting at once and detecting later have in common: what is recorded of a step, and when the run ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import LockstepError
from lightning_lockstep.overflow.detection.module_hooks import ModuleHooks
from lightning_lockstep.overflow.diagnosis.replay import StepRecord
from lightning_lockstep.overflow.diagnosis.trace import BatchTrace
from lightning_lockstep.overflow.report.actions import Counters
from lightning_lockstep.overflow.report.publishing import ReportPublisher
from lightning_lockstep.overflow.requirements import refuse_compiled
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.steps.random_state import RandomState
from lightning_lockstep.steps.snapshot import BufferCopies

__all__ = ["StepDetection"]


class StepDetection:
    """Detects overflows from its construction until :meth:`remove`.

    There is one on every rank; each method is called at the same point of the same step on all of them.
    A class that inherits wraps the training step with :meth:`_begin_step` once all it needs is there.
    """

    _watch: ModuleHooks | None
    _remove: Callable[[], None]

    def __init__(
        self, trainer: Trainer, module: LightningModule, settings: OverflowSettings, counters: Counters
    ) -> None:
        if settings.mode == "hooks":
            refuse_compiled(module)
        self._trainer, self._module, self._settings, self._counters = trainer, module, settings, counters
        self._device = module.device
        self._communicator = current_communicator()
        folder = Path(settings.report_dir or Path(trainer.log_dir or trainer.default_root_dir) / "overflow")
        self._publisher = ReportPublisher(self._communicator, folder, settings)
        self._trace = BatchTrace(settings)
        self._buffers = BufferCopies(module)
        self.record: StepRecord | None = None

    def remove(self) -> None:
        self._remove()
        self._publisher.close()
        if self._watch is not None:
            self._watch.remove()

    def after_backward(self) -> None:
        """Watch activations again: with manual optimization another forward may follow."""
        if self._watch is not None and not self._module.automatic_optimization:
            self._watch.active = True

    def _begin_step(self, step: Any, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
        """Record what a replay needs; return the context that the step runs in."""
        place = self._trainer.fit_loop.epoch_loop
        self._buffers.refresh()
        self.record = StepRecord(
            step,
            args,
            kwargs,
            RandomState.capture(self._device),
            self._buffers,
            place.total_batch_idx,
            place.batch_idx,
        )
        if self._watch is not None:
            self._watch.begin_step()
        return self._trace.context(self._module, self.record)

    def _is_last(self, record: StepRecord) -> bool:
        last = self._settings.abort_after_batch_num
        return last is not None and record.batch_number >= last

    def _abort_after(self, record: StepRecord) -> None:
        if self._is_last(record):
            raise LockstepError(
                f"OverflowDetector: aborting after batch {record.batch_number}, as"
                f" abort_after_batch_num={self._settings.abort_after_batch_num} asks."
            )
