"""The detector that looks at each step before its optimizer steps."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import LockstepError
from lightning_lockstep.numerics.statistics import any_bad, has_bad_values
from lightning_lockstep.overflow.activations import ActivationWatch
from lightning_lockstep.overflow.diagnose import Counters, Response
from lightning_lockstep.overflow.frames import FrameRecorder
from lightning_lockstep.overflow.replay import Occasion, StepRecord
from lightning_lockstep.overflow.report import COLUMNS, ReportPublisher
from lightning_lockstep.overflow.settings import OverflowSettings, refuse_compiled
from lightning_lockstep.overflow.underflow import UnderflowCheck
from lightning_lockstep.steps.capabilities import HasEngineGradients, RunsLater
from lightning_lockstep.steps.patching import put_in_place
from lightning_lockstep.steps.snapshot import BufferCopies, RandomState

# -- What detecting at once and detecting later have in common: what is recorded of a step, batches that are
# traced instead, and when the run ends


class StepDetection:
    """Detects overflows from its construction until :meth:`remove`."""

    # There is one on every rank; each method is called at the same point of the same step on all of them.

    watch_type = ActivationWatch

    def __init__(
        self, trainer: Trainer, module: LightningModule, settings: OverflowSettings, counters: Counters
    ) -> None:
        if settings.mode == "hooks":
            refuse_compiled(module)
        self._trainer, self._module, self._settings, self._counters = trainer, module, settings, counters
        self._communicator = current_communicator()
        strategy = trainer.strategy
        # Keeps a part of the gradients on each rank; None: they are whole, in ``.grad``.
        self._engine = strategy.engine_gradients() if isinstance(strategy, HasEngineGradients) else None
        self._seeded = strategy if isinstance(strategy, RunsLater) else None
        folder = Path(settings.report_dir or Path(trainer.log_dir or trainer.default_root_dir) / "overflow")
        self._publisher = ReportPublisher(self._communicator, folder, settings)
        self._buffers = BufferCopies(module)
        self._tracing: FrameRecorder | None = None  # of the batch under way, where it is traced
        # Whether a loss or activation that is bad on this rank is to reach the gradients of all ranks.
        self._spreads = False
        self.record: StepRecord | None = None
        self._watch = self.watch_type(module, settings) if settings.mode == "hooks" else None
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
        # Below the distributed wrapper and inside autocast.
        original = module.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            with self._begin_step(original, args, kwargs):
                return original(*args, **kwargs)

        self._put_back = put_in_place(module, "training_step", training_step)

    def remove(self) -> None:
        if self._watch is not None:  # first: its hook is one of the whole process
            self._watch.remove()
        self._put_back()
        self._publisher.close()

    def before_backward(self, loss: Tensor) -> None:
        """Keep the loss, and let a bad one reach every gradient and so every rank."""
        record = self.record
        if record is None:
            return
        record.loss = loss.detach().clone()
        flags = [] if self._settings.allowed.match("loss") else [record.loss]
        if self._watch is not None:
            record.activation_flag = self._watch.flag()
            self._watch.active = False
            flags += [] if record.activation_flag is None else [record.activation_flag]
        if self._spreads and loss.requires_grad and self._tracing is None:
            loss.register_hook(functools.partial(_spread_bad_values, flags))  # type: ignore[no-untyped-call]

    def after_backward(self) -> None:
        """Watch activations again: with manual optimization another forward may follow."""
        if self._watch is not None and not self._module.automatic_optimization:
            self._watch.active = True

    def _begin_step(self, step: Any, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
        """Record what a replay needs; return the context that the step runs in."""
        trainer = self._trainer
        place = trainer.fit_loop.epoch_loop
        occasion = Occasion(
            trainer.current_epoch, trainer.global_step, place.total_batch_idx, place.batch_idx
        )
        self._buffers.refresh()
        random = RandomState.capture(self._module.device)
        self.record = StepRecord(step, args, kwargs, random, self._buffers, occasion)
        if self._seeded is not None:
            self.record.device_seed = self._seeded.device_seed()
        if self._watch is not None:
            self._watch.begin_step()
        if occasion.batch_number not in self._settings.trace_batch_nums:
            return nullcontext()
        self._tracing = FrameRecorder(
            self._module, self._settings, whole=True, divided=self._response.divided
        )
        return self._tracing.recording()

    def _print_trace(self, occasion: Occasion) -> None:
        """Print and write what was traced of the batch that ended; its step itself has run."""
        recorder, self._tracing = self._tracing, None
        if recorder is None:
            return
        number, indent = occasion.batch_number, " " * 17
        where = f"rank {self._communicator.rank}, epoch {occasion.epoch}, step {occasion.step}"
        lines = [
            f"\n{indent} *** Starting batch number={number} *** ({where})",
            COLUMNS,
            *(frame.text() for frame in recorder.frames),
            f"{indent} *** Finished batch number={number} ***\n",
        ]
        self._publisher.publish_trace(number, "\n".join(lines))

    def _is_last(self, record: StepRecord) -> bool:
        last = self._settings.abort_after_batch_num
        return last is not None and record.occasion.batch_number >= last

    def _abort_after(self, record: StepRecord) -> None:
        if self._is_last(record):
            raise LockstepError(
                f"OverflowDetector: aborting after batch {record.occasion.batch_number}, as"
                f" abort_after_batch_num={self._settings.abort_after_batch_num} asks."
            )


def _spread_bad_values(flags: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """Return the gradient as it is, or nan where any flag is not finite."""
    # This way a loss that is bad on one rank, or an activation that the loss does not depend on, is in the
    # reduced gradients of every rank. A finite flag leaves each bit as it was.
    for flag in flags:
        gradient = gradient * (1 + (0 * flag).sum().to(gradient.dtype))
    return gradient


# -- The detection of one fit on one rank: what is recorded, checked and done at each point of a training
# step


class Detection(StepDetection):
    """Looks at each step before its weights change; see :class:`StepDetection`."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, settings: OverflowSettings, counters: Counters
    ) -> None:
        super().__init__(trainer, module, settings, counters)
        # A warning must not change the run, one process has no other rank to inform, and with an engine all ask.
        several = self._communicator.world_size > 1
        self._spreads = settings.action != "warn" and several and self._engine is None
        self._underflow = UnderflowCheck(settings, module)
        self._suspect: StepRecord | None = None  # a micro-batch that made the gradients bad
        self._last: StepRecord | None = None
        self._unread: list[StepRecord] = []  # whose flags of activations have not been read
        self._checked = 0  # optimizer steps

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Check, and act on a hit before the weights change."""
        record = self.record
        if record is None or self._tracing is not None:
            return
        if self._engine is not None and not self._engine.steps_now():
            return  # an accumulated batch, at whose end it is looked at
        record.optimizer_steps += 1
        record.stepped = True
        if self._watch is not None:
            self._watch.remember(self._trainer.global_step)
        on_all_ranks, origin = self._check(optimizer, record)
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
        if not record.stepped and self._tracing is None:
            self._keep(record)
            if self._suspect is None and self._micro_batch_is_bad(record):
                self._suspect = record
                self._buffers = BufferCopies(self._module)
        if record.skipped:
            self._module.log("overflow_skipped_steps", float(self._counters.skipped_steps))
        self._print_trace(record.occasion)
        self._abort_after(record)

    def end(self) -> None:
        """Act on a bad activation of the last steps, where the run ends between two reads."""
        origin = self._first_unread()
        if self._engine is not None:
            # Its next step would be in another fit, so that nothing is left to skip.
            if self._settings.mode == "hooks" and self._on_any_rank(origin is not None):
                origin = origin or self._last
                if origin is not None:
                    self._response.to_common_hit(self._trainer.optimizers[0], origin)
        elif origin is not None and self._communicator.world_size == 1:
            self._response.to_common_hit(self._trainer.optimizers[0], origin)
        elif origin is not None:
            self._response.to_single_rank_hit(origin)

    def _check(self, optimizer: Optimizer, record: StepRecord) -> tuple[bool, StepRecord | None]:
        """Return whether all ranks know of something bad, and the step to replay if this one does."""
        # A mean over ranks carries a nan of any of them into the gradients of all, unless each holds but a part.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        steps = [step for step in (self._suspect, record) if step is not None]
        here, origin = False, None
        # All at once first: each look makes the host wait for a GPU, and nearly always nothing is bad.
        if self._gradients_are_bad(parameters, [*self._losses(steps), *self._flags_due(record)]):
            here = self._gradients_are_bad(parameters)
            origin = next((step for step in steps if self._loss_is_bad(step)), None)
            origin = self._first_due(record) or origin
        elif self._is_due:
            self._unread = []
        # Nothing is sent without a hit, but for 4 bytes in this case.
        if self._communicator.world_size == 1 or self._engine is not None or not self._settings.gradients:
            return self._on_any_rank(here or origin is not None), origin
        return here, origin

    def _on_any_rank(self, here: bool) -> bool:
        if self._communicator.world_size == 1:
            return here
        return bool(self._communicator.all_reduce(torch.tensor(int(here), dtype=torch.int32), "max"))

    def _gradients_are_bad(self, parameters: Iterable[Tensor], others: Sequence[Tensor] = ()) -> bool:
        """Return whether a gradient, where they are looked at, or another value is bad; a GPU is waited for once."""
        if not self._settings.gradients:
            return any_bad(others)
        if self._engine is None:
            return any_bad([*(g for p in parameters if (g := p.grad) is not None), *others])
        return self._engine.known_bad() or any_bad(
            [*(g for g in self._engine.gradients() if g.numel()), *others]
        )

    def _losses(self, records: Iterable[StepRecord]) -> list[Tensor]:
        if self._settings.allowed.match("loss"):
            return []
        return [record.loss for record in records if record.loss is not None]

    def _loss_is_bad(self, record: StepRecord) -> bool:
        return any(map(has_bad_values, self._losses([record])))

    def _micro_batch_is_bad(self, record: StepRecord) -> bool:
        """Return whether gradients or loss are bad after a micro-batch that no optimizer step follows."""
        bad = self._gradients_are_bad(self._module.parameters(), self._losses([record]))
        # With an engine a bad gradient may lie on another rank: all ranks ask.
        return bad if self._engine is None else self._on_any_rank(bad)

    def _flags_due(self, record: StepRecord) -> list[Tensor]:
        """Return the activation flags that are to be read now, every so many optimizer steps; keep the others."""
        self._keep(record)
        self._checked += 1
        flags = [step.activation_flag for step in self._unread] if self._is_due else []
        return [flag for flag in flags if flag is not None]

    @property
    def _is_due(self) -> bool:
        return self._checked % self._settings.check_every_n_steps == 0

    def _first_due(self, record: StepRecord) -> StepRecord | None:
        """Return the first step with a bad activation of those that are to be read now."""
        every = self._settings.check_every_n_steps
        origin = self._first_unread() if self._is_due else None
        if origin is not None and origin is not record and every > 1:
            later = record.occasion.batch_number - origin.occasion.batch_number
            origin.notes.append(
                f"Found {later} batches later (check_every_n_steps={every}), and replayed with the weights of that"
                " later step."
            )
        return origin

    def _keep(self, record: StepRecord) -> None:
        if record.activation_flag is not None:
            self._unread.append(record)

    def _first_unread(self) -> StepRecord | None:
        """Return the first step with a bad activation that has not been read, and forget them all."""
        unread, self._unread = self._unread, []
        return next((step for step in unread if has_bad_values(step.activation_flag)), None)
