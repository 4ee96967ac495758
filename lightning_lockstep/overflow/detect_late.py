"""The detector for devices that run later what is called now: steps are looked at some steps after."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lockstep._doors.lightning import LightningModule, Trainer
from lightning_lockstep.numerics.gradients import FirstBad, bad_flag
from lightning_lockstep.numerics.statistics import NamePatterns, output_values
from lightning_lockstep.overflow.activations import ModuleHooks
from lightning_lockstep.overflow.detect import StepDetection
from lightning_lockstep.overflow.diagnose import Counters, Response
from lightning_lockstep.overflow.replay import StepRecord
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.overflow.step_check import spread_bad_values, wrap_training_step
from lightning_lockstep.steps.capabilities import RunsLater

# -- Every activation of every step, on devices whose operations run later: a flag per output, part of the
# step


class LateActivationWatch(ModuleHooks):
    """Forward hooks that add a flag per output to the step; nothing is read."""

    def __init__(
        self, root: nn.Module, *, allow_inf: NamePatterns, modules: NamePatterns | None = None
    ) -> None:
        self.names: list[str] = []
        self.flags: list[Tensor] = []
        self._allow_inf = allow_inf
        super().__init__(root, modules)

    def begin_step(self) -> None:
        self.names, self.flags = [], []
        super().begin_step()

    def _hook(self, name: str) -> Callable[[Any], None]:
        def hook(output: Any) -> None:
            for label, value in output_values(output):
                if isinstance(value, Tensor) and value.is_floating_point():
                    whole = f"{name}.{label}"
                    self.names.append(whole)
                    self.flags.append(bad_flag(value, allow_inf=self._allow_inf.match(whole)))

        return hook

    def nan_where_bad(self) -> Tensor | None:
        """Return zero, or nan when something bad was found in this step, on the device; ``None`` without outputs."""
        if not self.flags:
            return None
        any_bad = torch.stack(self.flags).any().float()
        return 0 * torch.log1p(-any_bad)


# -- The detection where operations run later than they are called: checked within the step, read every so
# many steps

# Steps noted between two reads: at first, and after reads that found nothing.
_FIRST_READ, _MOST_STEPS = 10, 50


@dataclass(frozen=True)
class _Noted:
    """A step that was noted: what its flags are of."""

    record: StepRecord
    optimizer: Optimizer
    key: tuple[Any, ...]
    gradients: list[str]
    outputs: list[str]


class LateDetection(StepDetection):
    """Reads nothing from the device in each step; see :class:`StepDetection`."""

    # The check of a step is part of what is compiled for it, and a small tensor keeps which step was the
    # first bad one. It is read after 10 steps, then after 20 more, up to every 50. With ``action="raise"``
    # the step that is bad, and all after it, leave parameters and buffers as they were, on the device and
    # without a read; so the batch is replayed later with the weights that it had.

    _watch: LateActivationWatch | None

    def __init__(
        self, trainer: Trainer, module: LightningModule, settings: OverflowSettings, counters: Counters
    ) -> None:
        super().__init__(trainer, module, settings, counters)
        self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        self._allow_inf = NamePatterns(settings.allow_inf)
        self._response = Response(
            trainer, module, settings, self._communicator, self._publisher, None, counters
        )
        self._holds = settings.action == "raise"  # a warning must not change the run
        self._first_bad = FirstBad(module.device)
        self._noted: list[_Noted] = []
        self._interval = _interval_of(settings)
        self._values: list[tuple[Tensor, Tensor]] = []
        self._handles = [
            optimizer.register_step_post_hook(self._after_optimizer_step) for optimizer in trainer.optimizers
        ]
        modules = None if settings.modules is None else NamePatterns(settings.modules)
        on = settings.mode == "hooks"
        self._watch = LateActivationWatch(module, allow_inf=self._allow_inf, modules=modules) if on else None
        self._remove = wrap_training_step(module, self._begin_step)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().remove()

    def before_backward(self, loss: Tensor) -> None:
        """Keep the loss, and let a bad one reach every gradient and so every rank."""
        record = self.record
        if record is None:
            return
        record.loss = loss.detach().clone()
        flags = [] if self._allow_inf.match("loss") else [record.loss]
        if self._watch is not None:
            self._watch.active = False
            flag = self._watch.nan_where_bad()
            flags += [] if flag is None else [flag]
        several = self._holds and self._communicator.world_size > 1
        if several and loss.requires_grad and not self._trace.active:
            loss.register_hook(functools.partial(spread_bad_values, flags))  # type: ignore[no-untyped-call]

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Add the check to the step, before the weights change."""
        record = self.record
        if record is None or self._trace.active:
            return
        record.optimizer_steps += 1
        record.stepped = True
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._note(record, optimizer, parameters, reduced=True)
        if self._holds:
            self._values = [(p, p.detach().clone()) for p in parameters]

    def _after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Undo the step on the device where a bad one has been noted."""
        values, self._values = self._values, []
        if values:
            self._hold([*values, *self._buffers.pairs()])

    def _hold(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            found = self._first_bad.found
            for tensor, before in pairs:
                tensor.copy_(torch.where(found, before, tensor))

    def _note(
        self, record: StepRecord, optimizer: Optimizer, parameters: list[Tensor], *, reduced: bool
    ) -> None:
        """Note a step, whose gradients are those of all ranks (``reduced``) or of this one."""
        checked = self._settings.gradients
        named = [(self._names.get(p, "?"), g) for p in parameters if checked and (g := p.grad) is not None]
        gradients = [bad_flag(gradient) for _, gradient in named]
        outputs = list(zip(self._watch.names, self._watch.flags, strict=True)) if self._watch else []
        flags = gradients + [flag for _, flag in outputs]
        if record.loss is not None and not self._allow_inf.match("loss"):
            flags.append(bad_flag(record.loss))
        if not flags:
            return
        alone = self._communicator.world_size == 1
        together = torch.stack(flags)
        common = together.any() if alone else together[: len(gradients) if reduced else 0].any()
        names = [name for name, _ in named], [name for name, _ in outputs]
        key = (id(optimizer), reduced, len(flags))
        self._first_bad.note(key, together, common=common)
        self._noted.append(_Noted(record, optimizer, key, *names))

    def batch_end(self) -> None:
        """Read the answer for the last steps, every so many of them."""
        record, self.record = self.record, None
        if record is None:
            return
        if not record.stepped and not self._trace.active and self._trainer.optimizers:
            optimizer = self._trainer.optimizers[0]
            self._note(record, optimizer, list(self._module.parameters()), reduced=False)
            if self._holds:
                self._hold(self._buffers.pairs())
        self._trace.finish(self._publisher, self._trainer, record)
        if self._is_last(record) or len(self._noted) >= self._interval:
            self.read()
        self._abort_after(record)

    def end(self) -> None:
        """Act on a bad value of the last steps."""
        self.read()

    def read(self) -> None:
        """Read the answer for all steps noted since the last read, and act on a hit."""
        if not self._noted:
            return
        common, here = self._first_bad.read()
        if common is None and here is None:
            self._counters.bad_in_a_row = 0
            self._noted.clear()
            self._begin_interval()
            return
        first = here if here is not None else common
        assert first is not None
        noted, later = self._noted[first], len(self._noted) - 1 - first
        self._describe(noted, later, found_here=here is not None)
        self._noted.clear()
        self._first_bad.forget()
        if common is not None or self._communicator.world_size == 1:
            self._response.to_common_hit(noted.optimizer, noted.record)
        else:
            self._response.to_single_rank_hit(noted.record)

    def _begin_interval(self) -> None:
        self._first_bad.forget()
        if self._settings.check_every_n_steps == 1:
            self._interval = min(self._interval + _FIRST_READ, _MOST_STEPS)

    def _describe(self, noted: _Noted, later: int, *, found_here: bool) -> None:
        """Say in the record what its flags say, and how much later they were read."""
        record = noted.record
        record.bad_gradients = []
        if found_here:
            flags = self._first_bad.flags_of(noted.key)
            record.bad_gradients = [name for name, flag in zip(noted.gradients, flags, strict=False) if flag]
            outputs = flags[len(noted.gradients) :]
            bad = [name for name, flag in zip(noted.outputs, outputs, strict=False) if flag]
            if bad:
                record.notes.append(f"Outputs with nan or inf in this step: {', '.join(bad)}.")
        if later:
            weights = (
                "parameters and buffers were kept as they were at this step"
                if self._holds
                else "the batch was replayed with the weights of that later step"
            )
            record.notes.append(
                f"Detected {later} steps after this step, because these devices execute asynchronously; {weights}."
            )

    def _begin_step(self, step: Any, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
        context, record, trainer = super()._begin_step(step, args, kwargs), self.record, self._trainer
        assert record is not None
        record.place = trainer.current_epoch, trainer.global_step
        if isinstance(trainer.strategy, RunsLater):
            record.device_seed = trainer.strategy.device_seed()
        return context


def _interval_of(settings: OverflowSettings) -> int:
    return _FIRST_READ if settings.check_every_n_steps == 1 else settings.check_every_n_steps
