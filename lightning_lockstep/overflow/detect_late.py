"""The detector for devices that run later what is called now: steps are looked at some steps after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.overflow.activations import ActivationWatch
from lightning_lockstep.overflow.detect import StepDetection
from lightning_lockstep.overflow.diagnose import Counters
from lightning_lockstep.overflow.replay import StepRecord
from lightning_lockstep.overflow.settings import OverflowSettings

# -- Which of many steps was the first with a bad value, noted on the device and read now and then --
# For devices whose operations are collected and compiled: a flag that is read in each step would stop each
# step. Here the step itself compares and keeps the number of the first bad one, so that nothing is compiled
# but the step, and one small tensor is read for many of them.


def bad_flag(tensor: Tensor, *, allow_inf: bool = False) -> Tensor:
    """Return whether a tensor holds a nan or an infinity, as a tensor on its device; nothing is read."""
    values = tensor.detach()
    return values.isnan().any() if allow_inf else values.isfinite().all().logical_not()


class FirstBad:
    """The first of the steps noted since :meth:`forget` in which something was bad."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Start again at step 0."""
        # Copied to the device rather than made there: a constant would be compiled into the first step.
        self._count, self._common, self._here = (
            torch.tensor(value, dtype=torch.int32).to(self._device) for value in (0, -1, -1)
        )

    @property
    def found(self) -> Tensor:
        """Whether a step that all ranks know to be bad has been noted, as a tensor on the device."""
        return self._common >= 0

    def note(self, here: Tensor, common: Tensor) -> None:
        """Note a step: whether it is bad on this rank, and in a way that all ranks see (bools on the device)."""
        with torch.no_grad():
            self._here = torch.where((self._here < 0) & here, self._count, self._here)
            self._common = torch.where((self._common < 0) & common, self._count, self._common)
            self._count = self._count + 1
            self._answer = torch.stack([self._common, self._here])

    def read(self) -> tuple[int | None, int | None]:
        """Return the first step that all ranks know to be bad, and the first that this rank knows to be bad."""
        # Waits for the last step noted; reads 8 bytes from the device.
        common, here = self._answer.tolist()
        return (None if common < 0 else common), (None if here < 0 else here)


class LateActivationWatch(ActivationWatch):
    """Adds a flag per output to the step, which says whether it is bad; nothing is read."""

    def flag(self) -> Tensor | None:
        return 0 * torch.log1p(-torch.stack(self.values).any().float()) if self.values else None

    def _note(self, name: str, label: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            self.outputs.append((name, label))
            self.values.append(bad_flag(tensor, allow_inf=self._allowed.match(f"{name}.{label}")))


# -- The detection where operations run later than they are called: checked within the step, read every so
# many steps

# Steps noted between two reads: at first, and after reads that found nothing.
_FIRST_READ, _MOST_STEPS = 10, 50


@dataclass(frozen=True)
class _Noted:
    """A step that was noted."""

    record: StepRecord
    optimizer: Optimizer
    flags: Tensor  # bool, on the device: of gradients, outputs and the loss
    gradients: list[str]
    outputs: list[str]


class LateDetection(StepDetection):
    """Reads nothing from the device in each step; see :class:`StepDetection`."""

    # The check of a step is part of what is compiled for it, and a small tensor keeps which step was the
    # first bad one. It is read after 10 steps, then after 20 more, up to every 50. With ``action="raise"``
    # the step that is bad, and all after it, leave parameters and buffers as they were, on the device and
    # without a read; so the batch is replayed later with the weights that it had.

    watch_type = LateActivationWatch

    def __init__(
        self, trainer: Trainer, module: LightningModule, settings: OverflowSettings, counters: Counters
    ) -> None:
        super().__init__(trainer, module, settings, counters)
        self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        self._holds = settings.action == "raise"  # a warning must not change the run
        self._spreads = self._holds and self._communicator.world_size > 1
        self._first_bad = FirstBad(module.device)
        self._noted: list[_Noted] = []
        every = settings.check_every_n_steps
        self._interval = _FIRST_READ if every == 1 else every
        self._values: list[tuple[Tensor, Tensor]] = []
        self._handles = [
            optimizer.register_step_post_hook(self._after_optimizer_step) for optimizer in trainer.optimizers
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().remove()

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Add the check to the step, before the weights change."""
        record = self.record
        if record is None or self._tracing is not None:
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
        flags = [bad_flag(gradient) for _, gradient in named]
        outputs = []
        if self._watch is not None:
            outputs = [f"{module}.{label}" for module, label in self._watch.outputs]
            flags += self._watch.values
        if record.loss is not None and not self._settings.allowed.match("loss"):
            flags.append(bad_flag(record.loss))
        if not flags:
            return
        alone = self._communicator.world_size == 1
        together = torch.stack(flags)
        common = together.any() if alone else together[: len(named) if reduced else 0].any()
        self._first_bad.note(together.any(), common)
        self._noted.append(_Noted(record, optimizer, together, [name for name, _ in named], outputs))

    def batch_end(self) -> None:
        """Read the answer for the last steps, every so many of them."""
        record, self.record = self.record, None
        if record is None:
            return
        if not record.stepped and self._tracing is None and self._trainer.optimizers:
            optimizer = self._trainer.optimizers[0]
            self._note(record, optimizer, list(self._module.parameters()), reduced=False)
            if self._holds:
                self._hold(self._buffers.pairs())
        self._print_trace(record.occasion)
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
            self._first_bad.forget()
            if self._settings.check_every_n_steps == 1:
                self._interval = min(self._interval + _FIRST_READ, _MOST_STEPS)
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

    def _describe(self, noted: _Noted, later: int, *, found_here: bool) -> None:
        """Say in the record what its flags say, and how much later they were read."""
        record = noted.record
        record.bad_gradients = []
        if found_here:
            flags = noted.flags.tolist()
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
