"""What every step costs while nothing is wrong: a record at its start, one look before the optimizer."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep._lightning import LightningModule
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.numerics.gradients import GradientCheck
from lightning_lockstep.numerics.module_values import NamePatterns
from lightning_lockstep.numerics.statistics import has_bad_values
from lightning_lockstep.overflow.replay import StepRecord
from lightning_lockstep.overflow.settings import OverflowSettings

__all__ = ["StepCheck", "spread", "wrap_training_step"]


class StepCheck:
    """Looks at the loss, the gradients and what was seen of the activations.

    Args:
        settings: What the detector was asked to do.
        communicator: Of the run.
    """

    def __init__(self, settings: OverflowSettings, communicator: Communicator) -> None:
        self._settings, self._communicator = settings, communicator
        self.loss_allowed = NamePatterns(settings.allow_inf).fit("loss")
        self._known: dict[int, tuple[list[Tensor], GradientCheck]] = {}
        self._unread: list[StepRecord] = []
        self._looks = 0

    def __call__(
        self, optimizer: Optimizer, record: StepRecord, suspect: StepRecord | None
    ) -> tuple[bool, StepRecord | None]:
        """Look before an optimizer step.

        Args:
            optimizer: The one about to step.
            record: The step under way.
            suspect: An earlier micro-batch that spoilt the gradients.

        Returns:
            Whether every rank knows of something bad, and the step to blame where this rank does.

        Ranks: all alike. Nothing is sent, but for 4 bytes with ``gradients=False`` on several ranks.
        """
        everywhere: bool | None = None
        if self._settings.gradients:
            # A mean over ranks carries a nan of any of them into the gradients of all.
            everywhere = self._gradients(optimizer).result()
        origin = next((one for one in (suspect, record) if one is not None and self._is_bad(one)), None)
        origin = self._read(record) or origin
        alone = self._communicator.world_size == 1
        if everywhere is None and not alone:
            here = torch.tensor(int(origin is not None), dtype=torch.int32)
            everywhere = bool(self._communicator.all_reduce(here, "max"))
        everywhere = bool(everywhere) or (alone and origin is not None)
        return everywhere, origin

    def keep(self, record: StepRecord) -> None:
        """Have what a step saw of the activations read at a later optimizer step."""
        if record.seen is not None:
            self._unread.append(record)

    def rest(self) -> StepRecord | None:
        """Return the first step that saw something bad and has not been read, and forget them all."""
        unread, self._unread = self._unread, []
        return next((step for step in unread if has_bad_values(step.seen)), None)

    def _gradients(self, optimizer: Optimizer) -> Any:
        known = self._known.get(id(optimizer))
        if known is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            known = self._known[id(optimizer)] = (parameters, GradientCheck())
        parameters, check = known
        return check.start([g for p in parameters if (g := p.grad) is not None])

    def _is_bad(self, record: StepRecord) -> bool:
        loss = record.loss
        if loss is None or self.loss_allowed:
            return False
        return not math.isfinite(loss.item()) if loss.numel() == 1 else has_bad_values(loss)

    def _read(self, record: StepRecord) -> StepRecord | None:
        """Read what was seen of the activations, every so many optimizer steps; nothing is lost in between."""
        self.keep(record)
        self._looks += 1
        every = self._settings.check_every_n_steps
        origin = None if self._looks % every else self.rest()
        if origin is not None and origin is not record and every > 1:
            origin.notes.append(
                f"Found {record.batch_number - origin.batch_number} batches later (check_every_n_steps={every}), and"
                " run again with the weights of then."
            )
        return origin


def spread(factors: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """Return the gradient as it is, or nan where any factor is not finite.

    This way a loss that is bad on one rank, or an activation that the loss does not depend on, is in the reduced
    gradients of every rank. A finite factor leaves each bit as it was.

    Args:
        factors: One-element tensors.
        gradient: Of the loss.
    """
    for factor in factors:
        gradient = gradient * (1 + (0 * factor).sum().to(gradient.dtype))
    return gradient


def wrap_training_step(
    module: LightningModule, begin: Callable[[Any, Any, Any], AbstractContextManager[Any]]
) -> Callable[[], None]:
    """Have ``begin`` called at the start of each ``training_step``, below DDP and inside autocast.

    Args:
        module: The LightningModule.
        begin: Is given the step, its arguments and its keyword arguments; the step runs in the context it gives.

    Returns:
        A function that takes it back.
    """
    original = module.training_step
    former = module.__dict__.get("training_step")

    @functools.wraps(original)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        with begin(original, args, kwargs):
            return original(*args, **kwargs)

    # Lightning and torch.compile look at the signature of what was there first.
    training_step.__wrapped__ = inspect.unwrap(original)
    module.__dict__["training_step"] = training_step

    def remove() -> None:
        if module.__dict__.get("training_step") is training_step:
            del module.__dict__["training_step"]
            if former is not None:
                module.__dict__["training_step"] = former

    return remove
