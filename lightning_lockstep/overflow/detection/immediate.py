"""The detection of one fit on one rank: what is recorded, checked and done at each point of a training step."""

from __future__ import annotations

import functools

from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.numerics.module_values import NamePatterns
from lightning_lockstep.overflow.detection.activation_watch import ActivationWatch
from lightning_lockstep.overflow.detection.base import StepDetection
from lightning_lockstep.overflow.detection.step_check import StepCheck, spread_bad_values
from lightning_lockstep.overflow.detection.training_step import wrap_training_step
from lightning_lockstep.overflow.detection.underflow import UnderflowCheck
from lightning_lockstep.overflow.diagnosis.replay import StepRecord
from lightning_lockstep.overflow.report.actions import Counters, Response
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.steps.engines import EngineGradients, HasEngineGradients
from lightning_lockstep.steps.snapshot import BufferCopies

__all__ = ["Detection"]


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
