"""What is looked at in every step: loss, gradients, values flushed to zero."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lockstep._doors.lightning import LightningModule, Trainer
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.numerics.gradients import GradientCheck, PendingFlag
from lightning_lockstep.numerics.statistics import LOW_PRECISION, NamePatterns, has_bad_values, plain_values
from lightning_lockstep.overflow.replay import StepRecord
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.steps.capabilities import EngineGradients
from lightning_lockstep.steps.patching import put_in_place

# -- Where a detection sees a training step: below the distributed wrapper and inside autocast --


def wrap_training_step(
    module: LightningModule, begin: Callable[[Any, Any, Any], AbstractContextManager[Any]]
) -> Callable[[], None]:
    """Run each ``training_step``, below DDP and inside autocast, within ``begin(step, args, kwargs)``."""
    # Returns what undoes it.
    original = module.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        with begin(original, args, kwargs):
            return original(*args, **kwargs)

    return put_in_place(module, "training_step", training_step)


# -- How much of a gradient or of an optimizer's update is lost because it is too small for its format --

_log = logging.getLogger(__name__)
_NAMED = 5
_GRADIENT_ADVICE = "Use a loss scaler (16-mixed), bf16, or float32 for these modules."
_UPDATE_ADVICE = (
    "Keep the weights in float32 (16-mixed or bf16-mixed instead of -true), or raise the learning rate."
)


class UnderflowCheck:
    """Warns when a large share of the gradients or of an Adam update is flushed to zero."""

    def __init__(self, settings: OverflowSettings, module: nn.Module) -> None:
        self._threshold = settings.underflow_threshold
        self._every = settings.underflow_every_n_steps
        self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        self._steps = 0
        self._warned: set[str] = set()

    def __call__(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Check every so many optimizer steps, and give each kind of warning once."""
        self._steps += 1
        if self._threshold is None or self._steps % self._every:
            return
        scaled = getattr(trainer.precision_plugin, "precision", "") == "16-mixed"
        gradients = [
            (self._names.get(p, "?"), p.grad)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and (scaled or p.grad.dtype in LOW_PRECISION)
        ]
        self._warn("of the gradients are flushed to zero", gradient_underflow(gradients), _GRADIENT_ADVICE)
        shares = adam_update_underflow(optimizer, self._names)
        self._warn(
            "of the Adam update changes no weight: it is too small for their format", shares, _UPDATE_ADVICE
        )

    def _warn(self, what: str, shares: Mapping[str, Share], advice: str) -> None:
        total = sum(share.counted for share in shares.values())
        lost = sum(share.lost for share in shares.values()) / total if total else 0.0
        if self._threshold is None or lost < self._threshold or what in self._warned:
            return
        self._warned.add(what)
        worst = sorted(shares.items(), key=lambda item: -item[1].value)[:_NAMED]
        named = ", ".join(f"{name} {share.value:.0%}" for name, share in worst)
        _log.warning("underflow: %.0f%% %s (worst: %s). %s", 100 * lost, what, named, advice)


@dataclass(frozen=True)
class Share:
    """How many of some values are lost."""

    lost: int
    counted: int  # never 0

    @property
    def value(self) -> float:
        """The share itself, from 0 to 1."""
        return self.lost / self.counted


def gradient_underflow(named: Iterable[tuple[str, Tensor]]) -> dict[str, Share]:
    """Return, by name, the share of each gradient that was flushed to zero."""
    # Whole rows of zeros (rows of an embedding that the batch did not use, units that are switched off) are
    # zero for another reason and do not count.
    shares = {}
    for name, gradient in named:
        values = plain_values(gradient)
        if values is None or values.dim() == 0:
            continue
        rows = values.reshape(-1, values.shape[-1]) if values.dim() > 1 else values.reshape(1, -1)
        zero = rows == 0
        used = ~zero.all(dim=1)
        count = int(used.sum()) * rows.shape[1]
        if count:
            shares[name] = Share(int(zero[used].sum()), count)
    return shares


def adam_update_underflow(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Share]:
    """Return, by name, the share of each weight that the next Adam update would leave as it is."""
    # Only float16 and bfloat16 weights are checked: an update smaller than half the distance to the next
    # number of that format changes nothing.
    shares = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if parameter.dtype not in LOW_PRECISION or "exp_avg" not in state or "exp_avg_sq" not in state:
                continue
            update = _adam_update(state, group)
            moved = update != 0
            count = int(moved.sum())
            if count:
                weight = parameter.detach()
                stuck = ((weight.float() - update).to(weight.dtype) == weight) & moved
                shares[names.get(parameter, "?")] = Share(int(stuck.sum()), count)
    return shares


def _adam_update(state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    first, second = group.get("betas", (0.9, 0.999))
    step = max(float(state["step"]), 1.0)
    mean: Tensor = state["exp_avg"].detach().float() / (1 - float(first) ** step)
    square: Tensor = state["exp_avg_sq"].detach().float() / (1 - float(second) ** step)
    update: Tensor = float(group["lr"]) * mean / (square.sqrt() + float(group.get("eps", 1e-8)))
    return update


# -- What a step without a hit costs: one check of the loss, the gradients and the activations before the
# optimizer


@dataclass(frozen=True)
class PendingCheck:
    """A check that was started before an optimizer step, and whose answer may still be on its way."""

    record: StepRecord  # of the step under way when the check began
    suspect: StepRecord | None  # an earlier micro-batch whose gradients were bad
    gradients: PendingFlag | None  # whether any is bad; None: not checked


class StepCheck:
    """Checks the loss, the gradients and the activations."""

    # A check is started before an optimizer step and finished when its answer is needed: at once, or, where a
    # device would have to be waited for, before the next optimizer step.

    def __init__(
        self,
        settings: OverflowSettings,
        communicator: Communicator,
        *,
        # Keeps a part of the gradients on each rank; None: they are whole.
        engine: EngineGradients | None = None,
        finishes_late: bool = False,  # gradients may have changed by the time a check is finished
    ) -> None:
        self._settings, self._communicator, self._engine = settings, communicator, engine
        self._finishes_late = finishes_late
        self.loss_allowed = NamePatterns(settings.allow_inf).match("loss")
        self._of_optimizer: dict[int, tuple[list[Tensor], GradientCheck]] = {}
        self._of_micro_batches = GradientCheck()
        self._unread: list[StepRecord] = []
        self._finished = 0

    def start(self, optimizer: Optimizer, record: StepRecord, suspect: StepRecord | None) -> PendingCheck:
        """Start a check before an optimizer step; nothing is waited for."""
        return PendingCheck(record, suspect, self._gradients(optimizer) if self._settings.gradients else None)

    def finish(self, pending: PendingCheck) -> tuple[bool, StepRecord | None]:
        """Return whether all ranks know of something bad, and the step to replay if this one does."""
        # On a GPU this waits for the answer.
        # A mean over ranks carries a nan of any of them into the gradients of all, unless each holds but a part.
        here = None if pending.gradients is None else pending.gradients.result()
        steps = [step for step in (pending.suspect, pending.record) if step is not None]
        origin = next((step for step in steps if self._is_bad(step)), None)
        origin = self._read_activations(pending.record) or origin
        alone = self._communicator.world_size == 1
        # Nothing is sent without a hit, but for 4 bytes in this case.
        if alone or self._engine is not None or here is None:
            return self.on_any_rank(bool(here) or origin is not None), origin
        return here, origin

    def on_any_rank(self, here: bool) -> bool:
        if self._communicator.world_size == 1:
            return here
        return bool(self._communicator.all_reduce(torch.tensor(int(here), dtype=torch.int32), "max"))

    def micro_batch_is_bad(self, parameters: Sequence[Tensor], record: StepRecord) -> bool:
        """Return whether gradients or loss are bad after a micro-batch that no optimizer step follows."""
        if self._engine is not None:  # a bad gradient may lie on another rank: all ranks ask
            bad = self._settings.gradients and self._of_engine(self._of_micro_batches).result()
            return self.on_any_rank(bad or self._is_bad(record))
        gradients = [g for p in parameters if (g := p.grad) is not None]
        return self._of_micro_batches.start(gradients).result() or self._is_bad(record)

    def keep(self, record: StepRecord) -> None:
        """Have the activation flag of a step read at a later optimizer step."""
        if record.activation_flag is not None:
            self._unread.append(record)

    def read_rest(self) -> StepRecord | None:
        """Return the first step with a bad activation that has not been read, and forget them all."""
        unread, self._unread = self._unread, []
        return next((step for step in unread if has_bad_values(step.activation_flag)), None)

    def _gradients(self, optimizer: Optimizer) -> PendingFlag:
        known = self._of_optimizer.get(id(optimizer))
        if known is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            check = GradientCheck(storages=not self._finishes_late)
            known = self._of_optimizer[id(optimizer)] = (parameters, check)
        parameters, check = known
        if self._engine is not None:
            return self._of_engine(check)
        return check.start([g for p in parameters if (g := p.grad) is not None])

    def _of_engine(self, check: GradientCheck) -> PendingFlag:
        assert self._engine is not None
        if self._engine.known_bad():
            return PendingFlag((), known=True)
        return check.start([g for g in self._engine.gradients() if g.numel()])

    def _is_bad(self, record: StepRecord) -> bool:
        loss = record.loss
        if loss is None or self.loss_allowed:
            return False
        return not math.isfinite(loss.item()) if loss.numel() == 1 else has_bad_values(loss)

    def _read_activations(self, record: StepRecord) -> StepRecord | None:
        """Read the activation flags, every so many optimizer steps; those in between are kept."""
        self.keep(record)
        self._finished += 1
        every = self._settings.check_every_n_steps
        origin = None if self._finished % every else self.read_rest()
        if origin is not None and origin is not record and every > 1:
            origin.notes.append(
                f"Found {record.batch_number - origin.batch_number} batches later (check_every_n_steps={every}), and"
                " replayed with the weights of that later step."
            )
        return origin


def spread_bad_values(flags: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """Return the gradient as it is, or nan where any flag is not finite."""
    # This way a loss that is bad on one rank, or an activation that the loss does not depend on, is in the
    # reduced gradients of every rank. A finite flag leaves each bit as it was.
    for flag in flags:
        gradient = gradient * (1 + (0 * flag).sum().to(gradient.dtype))
    return gradient
