"""What a step without a hit costs: one check of the loss, the gradients and the activations before the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep.distributed import Communicator
from lightning_lockstep.numerics.gradients import GradientCheck, PendingFlag
from lightning_lockstep.numerics.module_values import NamePatterns
from lightning_lockstep.numerics.statistics import has_bad_values
from lightning_lockstep.overflow.diagnosis.replay import StepRecord
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.steps.engines import EngineGradients

__all__ = ["PendingCheck", "StepCheck", "spread_bad_values"]


@dataclass(frozen=True)
class PendingCheck:
    """A check that was started before an optimizer step, and whose answer may still be on its way."""

    record: StepRecord  # of the step under way when the check began
    suspect: StepRecord | None  # an earlier micro-batch whose gradients were bad
    gradients: PendingFlag | None  # whether any is bad; None: not checked


class StepCheck:
    """Checks the loss, the gradients and the activations.

    A check is started before an optimizer step and finished when its answer is needed: at once, or, where a
    device would have to be waited for, before the next optimizer step.
    """

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
        """Return whether all ranks know of something bad, and the step to replay if this one does.

        On a GPU this waits for the answer.
        """
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
    """Return the gradient as it is, or nan where any flag is not finite.

    This way a loss that is bad on one rank, or an activation that the loss does not depend on, is in the reduced
    gradients of every rank. A finite flag leaves each bit as it was.
    """
    for flag in flags:
        gradient = gradient * (1 + (0 * flag).sum().to(gradient.dtype))
    return gradient
