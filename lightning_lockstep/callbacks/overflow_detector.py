"""OverflowDetector: which module, which rank, which batch, at no cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from lightning_lockstep.distributed import Communicator, current_communicator
from lightning_lockstep.errors import ConfigurationError, LockstepError
from lightning_lockstep.numerics.gradients import GradientCheck
from lightning_lockstep.numerics.module_values import NamePatterns
from lightning_lockstep.overflow.actions import Response, Tally
from lightning_lockstep.overflow.activation_watch import ActivationWatch, refuse_compiled
from lightning_lockstep.overflow.publishing import Sharing
from lightning_lockstep.overflow.replay import BufferKeeper, StepRecord
from lightning_lockstep.overflow.report import RankReport
from lightning_lockstep.overflow.settings import Action, Mode, OverflowSettings, sequence
from lightning_lockstep.overflow.step_check import StepCheck, spread, wrap_training_step
from lightning_lockstep.overflow.trace import BatchTrace
from lightning_lockstep.overflow.underflow_watch import UnderflowWatch
from lightning_lockstep.steps.random_state import RandomState

__all__ = ["OverflowDetector"]

# Strategies that do not keep whole gradients in ``.grad``, or whose backward is not autograd's.
_UNSUITED = ("DeepSpeed", "FSDP", "XLA", "ModelParallel")
_NOTHING = nullcontext()


class OverflowDetector(Callback):
    """Finds the module, rank and batch that made the first nan or infinity.

    Each step looks at the loss and at the reduced gradients. When they hold a bad value, and before weights
    change, the same batch is run again on each rank under hooks, and a report names who made it.

    Args:
        max_frames_to_save: Frames printed up to the first bad one.
        trace_batch_nums: Batches (from 0, over all epochs) whose frames are all printed; detection is off for
            these.
        abort_after_batch_num: Batch after which the run is ended with a :class:`~lightning_lockstep.LockstepError`.
        mode: ``"replay"`` looks at loss and gradients only; ``"hooks"`` also at every activation of every step,
            for overflows that reach neither.
        action: ``"raise"`` ends the run on all ranks alike; ``"warn"`` reports and goes on; ``"skip"`` leaves
            this optimizer step out on all ranks and gives up after ``max_skips`` in a row.
        gradients: Whether to look at gradients. Without, the loss alone decides, and several ranks exchange
            4 bytes each step.
        allow_inf: Patterns of values that may be infinite, such as ``*.mask*``.
        modules: Patterns of the modules to look at; ``None`` for all.
        report_dir: Folder for the reports, which then get a picture too (needs matplotlib); by default the
            folder ``overflow`` in the run's log folder, without a picture.
        max_skips: For ``"skip"``: how many in a row.
        check_every_n_steps: For ``mode="hooks"``: read what was seen of the activations every so many optimizer
            steps, which on a GPU spares waiting. The batches since the last read are kept, and one found bad is
            run again with the weights of then. Has no effect where several ranks act together.
        underflow_threshold: Warn when this share of the gradients, or of an Adam update of float16 or bfloat16
            weights, is flushed to zero; ``None`` for no such watch.
        underflow_every_n_steps: How often to look for that [optimizer steps].
        scale_floor: Loss scale at which an overflow of scaled gradients is no ordinary one any more.
        timeout: Longest wait for the other ranks' findings after a hit [s].

    Attributes:
        skipped_steps: Optimizer steps left out so far.
        scaler_skips: Ordinary skips of an fp16 loss scaler so far; they are no alarms.
        reports: Reports of this rank so far.

    Raises:
        ConfigurationError: Options that cannot be used, all of them named.

    Ranks: all ranks alike. A step without a hit sends nothing; after a hit each rank posts its findings over the
    side channel.
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
        check_every_n_steps: int = 1,
        underflow_threshold: float | None = 0.5,
        underflow_every_n_steps: int = 100,
        scale_floor: float = 1.0,
        timeout: float = 300.0,
    ) -> None:
        super().__init__()
        self.settings = OverflowSettings(
            max_frames_to_save=max_frames_to_save,
            trace_batch_nums=sequence(trace_batch_nums),
            abort_after_batch_num=abort_after_batch_num,
            mode=mode,
            action=action,
            gradients=gradients,
            allow_inf=sequence(allow_inf),
            modules=sequence(modules),
            report_dir=None if report_dir is None else Path(report_dir),
            max_skips=max_skips,
            check_every_n_steps=check_every_n_steps,
            underflow_threshold=underflow_threshold,
            underflow_every_n_steps=underflow_every_n_steps,
            scale_floor=scale_floor,
            timeout=timeout,
        )
        self._tally = Tally()
        self._remove: Callable[[], None] | None = None
        self._record: StepRecord | None = None
        self._suspect: StepRecord | None = None

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps left out so far."""
        return self._tally.skipped_steps

    @property
    def scaler_skips(self) -> int:
        """Ordinary skips of an fp16 loss scaler so far."""
        return self._tally.scaler_skips

    @property
    def reports(self) -> list[RankReport]:
        """Reports of this rank so far."""
        return self._tally.reports

    # ------------------------------------------------------------------ begin and end

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, and open the side channel while all ranks are here."""
        if stage != "fit":
            return
        name = type(trainer.strategy).__name__
        if any(word in name for word in _UNSUITED):
            raise ConfigurationError(
                f"OverflowDetector does not work with {name}: it needs whole gradients in `.grad` and autograd's own"
                " backward. Use a DDP or single-device strategy to look for the overflow."
            )
        if getattr(trainer.strategy, "_model_averaging_period", None):
            raise ConfigurationError(
                f"OverflowDetector does not work with model_averaging_period on {name}: between two averages each rank"
                " has gradients of its own, so that one rank would act alone. Leave the averaging out while you look."
            )
        _ = current_communicator().side_channel

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the detector in place."""
        self._uninstall()
        settings = self.settings
        self._device = pl_module.device
        if settings.mode == "hooks":
            refuse_compiled(pl_module)
        self._communicator: Communicator = current_communicator()
        folder = settings.report_dir or Path(trainer.log_dir or trainer.default_root_dir) / "overflow"
        self._sharing = Sharing(self._communicator, folder, settings)
        self._trace = BatchTrace(settings)
        self._check = GradientCheck()
        # A warning must not change the run, and one process needs no telling.
        self._spreads = settings.action != "warn" and self._communicator.world_size > 1
        self._buffers = BufferKeeper(pl_module)
        self._look = StepCheck(settings, self._communicator)
        self._underflow = UnderflowWatch(settings, pl_module)
        self._watch: ActivationWatch | None = None
        if settings.mode == "hooks":
            self._watch = ActivationWatch(
                pl_module,
                self._device,
                allow_inf=NamePatterns(settings.allow_inf),
                modules=None if settings.modules is None else NamePatterns(settings.modules),
                keep_history=settings.report_dir is not None,
            )
        self._response = Response(settings, self._communicator, self._sharing, self._watch, self._tally)
        begin = functools.partial(self._begin_step, trainer.fit_loop.epoch_loop, pl_module)
        self._remove = wrap_training_step(pl_module, begin)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what has not been read yet, and take everything away."""
        try:
            if self._remove is not None:
                self._read_rest(trainer, pl_module)
        finally:
            self._uninstall()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take everything away."""
        self._uninstall()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take everything away."""
        self._uninstall()

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {"skipped_steps": self.skipped_steps, "scaler_skips": self.scaler_skips}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the counters over."""
        self._tally.skipped_steps = state_dict["skipped_steps"]
        self._tally.scaler_skips = state_dict["scaler_skips"]

    def _uninstall(self) -> None:
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()
            self._sharing.close()
            if self._watch is not None:
                self._watch.remove()
        self._record = self._suspect = None

    # ------------------------------------------------------------------ each step

    def _begin_step(
        self, place: Any, module: LightningModule, step: Any, args: Any, kwargs: Any
    ) -> AbstractContextManager[Any]:
        """Take a record; return the context that the step runs in."""
        if self._remove is None:
            return _NOTHING
        self._buffers.refresh()
        self._record = StepRecord(
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
        return self._trace.maybe(module, self._record)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Note the loss, and let a bad one reach every gradient and so every rank."""
        record = self._record
        if record is None:
            return
        record.loss = loss.detach().clone()
        record.seen = None
        if self._watch is not None:
            record.seen = self._watch.factor()
            self._watch.active = False
        if self._spreads and loss.requires_grad and not self._trace.active:
            factors = [] if self._look.loss_allowed else [record.loss]
            if record.seen is not None:
                factors.append(record.seen)
            loss.register_hook(functools.partial(spread, factors))  # type: ignore[no-untyped-call]

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch on: with manual optimisation another forward may follow."""
        if self._watch is not None and not pl_module.automatic_optimization:
            self._watch.active = True

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Look, and act on what is found before the weights change."""
        record = self._record
        if record is None or self._trace.active:
            return
        record.optimizer_steps += 1
        record.stepped = True
        if self._watch is not None:
            self._watch.remember(trainer.global_step)
        everywhere, origin = self._look(optimizer, record, self._suspect)
        if everywhere:
            origin = self._suspect or origin or record
            self._response.common_hit(trainer, pl_module, optimizer, origin)
            record.skipped = origin.skipped
        else:
            self._tally.bad_in_a_row = 0
            if origin is not None:
                self._response.lone_hit(trainer, pl_module, origin)
            self._underflow.look(trainer, optimizer, main=self._communicator.is_main)
        self._suspect = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let go of the batch, unless it spoilt the gradients that are being accumulated."""
        record, self._record = self._record, None
        if record is None:
            return
        if not record.stepped and not self._trace.active:
            self._look.keep(record)
        if not record.stepped and self._suspect is None and not self._trace.active:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            loss = [] if record.loss is None else [record.loss]
            if self._check.start([*gradients, *loss]).result():
                self._suspect = record
                self._buffers = BufferKeeper(pl_module)
        if record.skipped:
            pl_module.log("overflow_skipped_steps", float(self.skipped_steps))
        self._trace.finish(self._sharing, trainer, record)
        last = self.settings.abort_after_batch_num
        if last is not None and record.batch_number >= last:
            raise LockstepError(
                f"OverflowDetector: aborting after batch {record.batch_number}, as abort_after_batch_num={last} asks."
            )

    def _read_rest(self, trainer: Trainer, module: LightningModule) -> None:
        """Act on a bad activation of the last steps, where the run ends between two reads."""
        origin = self._look.rest()
        if origin is None:
            return
        if self._communicator.world_size == 1:
            self._response.common_hit(trainer, module, trainer.optimizers[0], origin)
        else:
            self._response.lone_hit(trainer, module, origin)
