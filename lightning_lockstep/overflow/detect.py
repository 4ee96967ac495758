"""The detector that looks at each step before its optimizer steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep._doors.lightning import LightningModule, Trainer
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import LockstepError
from lightning_lockstep.numerics.statistics import NamePatterns
from lightning_lockstep.overflow.activations import ActivationWatch, ModuleHooks
from lightning_lockstep.overflow.diagnose import Counters, Response
from lightning_lockstep.overflow.frames import FrameRecorder
from lightning_lockstep.overflow.replay import StepRecord
from lightning_lockstep.overflow.report import ReportPublisher
from lightning_lockstep.overflow.settings import OverflowSettings, refuse_compiled
from lightning_lockstep.overflow.step_check import (
    StepCheck,
    UnderflowCheck,
    spread_bad_values,
    wrap_training_step,
)
from lightning_lockstep.steps.capabilities import EngineGradients, HasEngineGradients, capabilities_of
from lightning_lockstep.steps.snapshot import BufferCopies, RandomState

# -- Tracing chosen batches: all their frames, no detection --


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


# -- What detecting at once and detecting later have in common: what is recorded of a step, and when the run
# ends


class StepDetection:
    """Detects overflows from its construction until :meth:`remove`."""

    # There is one on every rank; each method is called at the same point of the same step on all of them. A
    # class that inherits wraps the training step with :meth:`_begin_step` once all it needs is there.

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
        if self._watch is not None:  # first: its hook is one of the whole process
            self._watch.remove()
        self._remove()
        self._publisher.close()

    def after_backward(self) -> None:
        """Watch activations again: with manual optimization another forward may follow."""
        if self._watch is not None and not self._module.automatic_optimization:
            self._watch.active = True

    def _begin_step(self, step: Any, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
        """Record what a replay needs; return the context that the step runs in."""
        place = self._trainer.fit_loop.epoch_loop
        self._buffers.refresh()
        self.record = StepRecord(
            *(step, args, kwargs, RandomState.capture(self._device), self._buffers),
            *(place.total_batch_idx, place.batch_idx),
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


# -- The detection of one fit on one rank: what is recorded, checked and done at each point of a training
# step


class Detection(StepDetection):
    """Looks at each step before its weights change; see :class:`StepDetection`."""

    _watch: ActivationWatch | None

    def __init__(
        self, trainer: Trainer, module: LightningModule, settings: OverflowSettings, counters: Counters
    ) -> None:
        super().__init__(trainer, module, settings, counters)
        self._engine = _engine_of(trainer)
        # A warning must not change the run, one process has no other rank to inform, and with an engine all ask.
        self._spreads = (
            settings.action != "warn" and self._communicator.world_size > 1 and self._engine is None
        )
        self._check = StepCheck(settings, self._communicator, engine=self._engine)
        self._underflow = UnderflowCheck(settings, module)
        self._watch = _activation_watch(module, settings) if settings.mode == "hooks" else None
        self._response = Response(
            trainer,
            module,
            settings,
            self._communicator,
            self._publisher,
            self._watch,
            counters,
            self._engine,
        )
        self._suspect: StepRecord | None = None
        self._last: StepRecord | None = None
        self._remove = wrap_training_step(module, self._begin_step)

    def before_backward(self, loss: Tensor) -> None:
        """Keep the loss, and let a bad one reach every gradient and so every rank."""
        record = self.record
        if record is None:
            return
        record.loss = loss.detach().clone()
        record.activation_flag = None
        if self._watch is not None:
            record.activation_flag = self._watch.flag()
            self._watch.active = False
        if self._spreads and loss.requires_grad and not self._trace.active:
            flags = [] if self._check.loss_allowed else [record.loss]
            if record.activation_flag is not None:
                flags.append(record.activation_flag)
            loss.register_hook(functools.partial(spread_bad_values, flags))  # type: ignore[no-untyped-call]

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Check, and act on a hit before the weights change."""
        record = self.record
        if record is None or self._trace.active:
            return
        if self._engine is not None and not self._engine.steps_now():
            return  # an accumulated batch, at whose end it is looked at
        record.optimizer_steps += 1
        record.stepped = True
        if self._watch is not None:
            self._watch.remember(self._trainer.global_step)
        on_all_ranks, origin = self._check.finish(self._check.start(optimizer, record, self._suspect))
        if on_all_ranks:
            origin = self._suspect or origin or record
            self._response.to_common_hit(optimizer, origin)
            record.skipped = origin.skipped
        else:
            self._counters.bad_in_a_row = 0
            if origin is not None:
                self._response.to_single_rank_hit(origin)
            # Reduced gradients are the same on every rank.
            if self._communicator.is_main:
                self._underflow(self._trainer, optimizer)
        self._suspect = None

    def batch_end(self) -> None:
        """Let go of the batch, unless it made the gradients bad that are being accumulated."""
        record, self.record = self.record, None
        if record is None:
            return
        if self._engine is not None and self._watch is not None:
            self._last = record
        if not record.stepped and not self._trace.active:
            self._check.keep(record)
            if self._suspect is None and self._check.micro_batch_is_bad(
                list(self._module.parameters()), record
            ):
                self._suspect = record
                self._buffers = BufferCopies(self._module)
        if record.skipped:
            self._module.log("overflow_skipped_steps", float(self._counters.skipped_steps))
        self._trace.finish(self._publisher, self._trainer, record)
        self._abort_after(record)

    def end(self) -> None:
        """Act on a bad activation of the last steps, where the run ends between two reads."""
        origin = self._check.read_rest()
        if self._engine is not None:
            # Its next step would be in another fit, so that nothing is left to skip.
            if self._settings.mode == "hooks" and self._check.on_any_rank(origin is not None):
                origin = origin or self._last
                if origin is not None:
                    self._response.to_common_hit(self._trainer.optimizers[0], origin)
            return
        if origin is None:
            return
        if self._communicator.world_size == 1:
            self._response.to_common_hit(self._trainer.optimizers[0], origin)
        else:
            self._response.to_single_rank_hit(origin)


def _engine_of(trainer: Trainer) -> EngineGradients | None:
    """Return the check of gradients that an engine keeps to itself; ``None`` where they are in ``.grad``."""
    strategy = trainer.strategy
    return strategy.engine_gradients() if isinstance(strategy, HasEngineGradients) else None


def _activation_watch(module: LightningModule, settings: OverflowSettings) -> ActivationWatch:
    return ActivationWatch(
        module,
        module.device,
        allow_inf=NamePatterns(settings.allow_inf),
        modules=None if settings.modules is None else NamePatterns(settings.modules),
        keep_history=settings.report_dir is not None,
    )
