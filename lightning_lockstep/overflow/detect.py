"""The detection of one fit on one rank: what is recorded and looked at, at each point of a training step.

training_step begins      a StepRecord has all that a replay needs
before the backward       it gets the loss; a bad one makes the gradients of all ranks bad
before an optimizer step  every n-th time: are losses, activations or gradients bad since the last look?
the batch ends            a micro-batch that no step followed is looked at by itself, or kept for the next look
the fit ends              what was not looked at yet
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.numerics.statistics import any_bad, has_bad_values, module_names, output_values
from lightning_lockstep.overflow.frames import FrameRecorder
from lightning_lockstep.overflow.replay import Occasion, StepRecord, is_divided
from lightning_lockstep.overflow.report import ReportPublisher
from lightning_lockstep.overflow.settings import OverflowSettings, refuse_compiled
from lightning_lockstep.steps.capabilities import StepGradients, capabilities_of
from lightning_lockstep.steps.patching import do_nothing, put_in_place, replaced
from lightning_lockstep.steps.snapshot import BufferCopies, RandomState

_log = logging.getLogger(__name__)
# Optimizer steps between two checks on devices that run operations later: each check makes the host wait for them.
_LATER = 10


class Detection:
    """Looks at the steps of one fit, from its construction until :meth:`remove`."""

    # There is one on every rank; each method is called at the same point of the same step on all of them.

    def __init__(self, trainer: Trainer, module: LightningModule, publisher: ReportPublisher) -> None:
        settings = publisher.settings
        if settings.mode == "hooks":
            refuse_compiled(module)
        self._trainer, self._module, self._settings, self._publisher = trainer, module, settings, publisher
        self._communicator = publisher.communicator
        strategy: Any = trainer.strategy
        self.gradients = StepGradients(module, trainer.precision_plugin)
        if hasattr(strategy, "engine_gradients"):
            self.gradients = strategy.engine_gradients()
        self._seeded = strategy if hasattr(strategy, "device_seed") else None
        # With action='skip' each step is checked, because one that was taken cannot be skipped.
        rarely = not capabilities_of(strategy).runs_at_once and settings.action != "skip"
        self._every = settings.check_every_n_steps or (_LATER if rarely else 1)
        # Whether a loss or activation that is bad on this rank is to reach the gradients of all ranks. Not with
        # ``warn``, which must not change the run, not in one process, and not if they are divided: then all ranks ask.
        several = self._communicator.world_size > 1
        self._spreads = settings.action != "warn" and several and not self.gradients.divided
        self._buffers = BufferCopies(module)
        self._tracing: FrameRecorder | None = None  # the frames of the current batch, if it is traced
        self.record: StepRecord | None = None  # the current step
        self._unread: list[StepRecord] = []  # the steps since the last look
        self._last: StepRecord | None = None  # set if some steps may be unchecked when the fit ends
        self._steps = 0  # of the optimizer, so far
        self._watch = _ActivationWatch(module, settings)
        # Below the distributed wrapper and inside autocast.
        original = module.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            with self._begin_step(original, args, kwargs):
                return original(*args, **kwargs)

        self._put_back = put_in_place(module, "training_step", training_step)

    def remove(self) -> None:
        self._watch.remove()  # first: its hook is one of the whole process
        self._put_back()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which outputs of modules are not those of the step, as in a replay."""
        return replaced(self._watch, active=False)

    # -- what is recorded --

    def _begin_step(self, step: Any, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
        """Record what a replay needs; return the context that the step runs in."""
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        occasion = Occasion(trainer.current_epoch, trainer.global_step, loop.total_batch_idx, loop.batch_idx)
        self._buffers.refresh()
        self.record = StepRecord(step, args, kwargs, RandomState(), self._buffers, occasion)
        place_of = getattr(trainer.strategy, "place_of", do_nothing)
        self.record.place = place_of([*args, *kwargs.values()][0])
        if self._seeded is not None:
            self.record.device_seed = self._seeded.device_seed()
        self._watch.begin_step()
        if occasion.batch_number not in self._settings.trace_batch_nums:
            return nullcontext()
        self._tracing = FrameRecorder(self._module, self._settings, whole=True, divided=is_divided(trainer))
        return self._tracing.recording()

    def before_backward(self, loss: Tensor) -> None:
        """Keep the loss, and let a bad one reach every gradient and so every rank."""
        record = self.record
        if record is None:
            return
        weights = getattr(self._trainer.strategy, "weights", None)
        record.weight = 1.0 if weights is None else weights.weight
        if record.weight == 0.0:  # whatever the loss is, its gradients are zero
            return
        record.loss = loss.detach().clone()
        record.activation_flag = self._watch.flag()
        self._watch.active = False
        if self._spreads and loss.requires_grad and self._tracing is None:
            loss.register_hook(functools.partial(_spread_bad_values, self._values(record)))  # type: ignore[no-untyped-call]

    def after_backward(self) -> None:
        """Watch activations again: with manual optimization another forward may follow."""
        self._watch.active = not self._module.automatic_optimization

    # -- what is looked at --

    def before_optimizer_step(self, optimizer: Optimizer) -> tuple[bool, StepRecord | None]:
        """Check in every n-th step; return whether this one was checked, and the step in which a value was bad."""
        record = self.record
        if record is None or self._tracing is not None:
            return False, None
        if not self.gradients.steps_now():
            return False, None  # the batch is accumulated, and is checked at its end
        record.optimizer_steps += 1
        self._unread.append(record)
        self._steps += 1
        if self._steps % self._every:
            return False, None
        return True, self._look(record, optimizer)

    def batch_end(self) -> None:
        record, self.record = self.record, None
        if record is None:
            return
        if self._settings.mode == "hooks" or self._every > 1:
            self._last = record
        if not record.optimizer_steps and self._tracing is None:
            # Only the first micro-batch that makes gradients bad is marked: they stay bad until the optimizer steps.
            if self._every == 1 and not any(step.made_gradients_bad for step in self._unread):
                bad = self._gradients_are_bad(None, self._losses(record))
                if self.gradients.divided:  # a bad one may lie in the part of another rank
                    bad = bool(self._communicator.agree(bad))
                record.made_gradients_bad = bad
            if record.made_gradients_bad:
                self._buffers = BufferCopies(self._module)  # the record keeps its own
            if self._every > 1 or record.made_gradients_bad or record.activation_flag is not None:
                self._unread.append(record)
        if self._tracing is not None:
            self._publisher.publish_trace(record.occasion, self._tracing.frames)
            self._tracing = None

    def end(self) -> StepRecord | None:
        """Look at the last steps, if the run ends between two looks; return that in which a value was bad."""
        if self._last is None:  # each step was looked at: the same on every rank
            return None
        # Gradients of a batch that no step followed are not those of all ranks, so all ask.
        with_gradients = self._every > 1 and not self.gradients.divided and bool(self._unread)
        return self._look(self._last, with_gradients=with_gradients, ask=True)

    def _look(
        self,
        record: StepRecord,  # reported if this rank has no bad value of its own
        optimizer: Optimizer | None = None,  # whose gradients are looked at; None: all
        *,
        with_gradients: bool = True,
        ask: bool = False,
    ) -> StepRecord | None:
        """Return, on all ranks or on none, the step in which a value was bad."""
        steps, self._unread = self._unread, []
        origin = next((step for step in steps if step.made_gradients_bad), None)
        values = [value for step in steps for value in self._values(step)]
        gradients_bad = False
        # All are checked at once first: each check makes the host wait for a GPU, and nearly always nothing is bad.
        if self._gradients_are_bad(optimizer, values) if with_gradients else any_bad(values):
            gradients_bad = with_gradients and self._gradients_are_bad(optimizer)
            bad_steps = (step for step in steps if any(map(has_bad_values, self._values(step))))
            origin = origin or next(bad_steps, None)
        # A mean over ranks carries a nan of any rank into the gradients of all, so nothing need be sent. If each rank
        # holds a part of the gradients, if they are not looked at, and after the last step, all ranks ask.
        is_bad = gradients_bad
        if self._spreads and self._settings.gradients and not ask:
            if origin is not None and not gradients_bad:
                _log.warning(
                    "nan or inf in batch %d of this rank, but in no gradient of the step."
                    " OverflowDetector(action='warn') names the module.",
                    origin.occasion.batch_number,
                )
        else:
            is_bad = bool(self._communicator.agree(gradients_bad or origin is not None))
        if not is_bad:
            return None
        if origin is not None and origin is not record and self._every > 1:
            later = record.occasion.batch_number - origin.occasion.batch_number
            origin.notes.append(
                f"Found {later} batches later (check_every_n_steps={self._every}), and replayed with the weights of"
                " that later step. With check_every_n_steps=1 a batch is replayed with its own."
            )
        return origin or record

    def _gradients_are_bad(self, optimizer: Optimizer | None, others: Sequence[Tensor] = ()) -> bool:
        """Return whether a gradient, if they are looked at, or another value is bad; a GPU is waited for once."""
        if not self._settings.gradients:
            return any_bad(others)
        own = (gradient for gradient in self.gradients.gradients(optimizer) if gradient.numel())
        return self.gradients.known_bad() or any_bad([*own, *others])

    def _losses(self, record: StepRecord) -> list[Tensor]:
        return [] if record.loss is None or self._settings.allowed.match("loss") else [record.loss]

    def _values(self, record: StepRecord) -> list[Tensor]:
        """Return the loss of a step, if it is looked at, and the flag of its activations."""
        return self._losses(record) + ([] if record.activation_flag is None else [record.activation_flag])


def _spread_bad_values(flags: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """Return the gradient as it is, or nan if any flag is not finite."""
    # So the reduced gradients of every rank show a loss that is bad on one rank, or an activation that the loss
    # does not depend on. A finite flag leaves each bit as it was.
    for flag in flags:
        gradient = gradient * (1 + (0 * flag).sum().to(gradient.dtype))
    return gradient


# -- Every activation of every step (``mode="hooks"``) --


class _ActivationWatch:
    """With ``mode="hooks"`` notes lowest and highest value of each output of a step; no GPU is waited for."""

    # One hook for all modules of the process, and none on those of the model: a copy of the model, or one that is
    # loaded from a pickle, would keep it.

    def __init__(self, module: LightningModule, settings: OverflowSettings) -> None:
        self.active = False  # whether outputs are looked at now
        self._values: list[Tensor] = []  # lowest and highest of each output of this step, on the device
        self._allowed = settings.allowed
        self._device = torch.empty(0, device=module.device).device  # with its index
        self._on_xla = self._device.type == "xla"
        self._names = {m: name for m, name in module_names(module).items() if settings.watched.match(name)}
        self._handles = [register_module_forward_hook(self._called)] if settings.mode == "hooks" else []

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_step(self) -> None:
        """Forget the last step and watch from here on."""
        self._values, self.active = [], True

    def flag(self) -> Tensor | None:
        """Return a number on the device: zero, or nan when an output of this step was bad; ``None`` without any."""
        return (0 * torch.stack(self._values)).sum(dtype=torch.float32) if self._values else None

    def _called(self, module: Any, args: Any, output: Any) -> None:
        if not self.active or (name := self._names.get(module)) is None:
            return
        # Nearly every output is one tensor, and each microsecond is multiplied by the number of modules.
        values = (("output", output),) if isinstance(output, Tensor) else output_values(output)
        for label, value in values:
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self._note(name, label, value)

    def _note(self, name: str, label: str, tensor: Tensor) -> None:
        allow_inf = bool(self._allowed.patterns) and self._allowed.match(f"{name}.{label}")
        ends: Sequence[Tensor]
        try:
            if tensor.device != self._device or hasattr(tensor, "to_local"):
                raise NotImplementedError  # the slower way below
            values = tensor.detach()
            if self._on_xla:
                # Its minimum and maximum ignore a nan, and aminmax is read to the host.
                bad_here = values.isnan().any() if allow_inf else ~values.isfinite().all()
                ends = (torch.where(bad_here, float("nan"), 0.0),) * 2
            else:
                ends = torch.aminmax(values)
        except (RuntimeError, NotImplementedError, TypeError):
            # Sparse, complex, empty, meta, a DTensor, of 8 bits, or on another device: look at it now.
            bad = has_bad_values(tensor, allow_inf=allow_inf)
            ends = (torch.tensor(float("nan") if bad else 0.0, device=self._device),) * 2
        if allow_inf:
            ends = [torch.where(end.isinf(), 0, end) for end in ends]
        self._values += ends
