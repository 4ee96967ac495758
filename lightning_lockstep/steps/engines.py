"""What a strategy offers whose engine makes the steps and keeps gradients to itself (DeepSpeed), as protocols.

They let callbacks work with an engine that they know nothing of: the rooms of the callbacks do not import its room.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor

from lightning_lockstep._lightning import LightningModule

__all__ = [
    "EngineGradients",
    "EngineState",
    "EngineTrials",
    "HasEngineGradients",
    "HasEngineTrials",
    "StepsApart",
]


@runtime_checkable
class StepsApart(Protocol):
    """A strategy whose engine makes the steps, and which can step aside for a step made apart from the run."""

    def steps_apart(self, module: LightningModule) -> AbstractContextManager[None]:
        """Let the body run ``module``, not wrapped, by autograd alone, and leave the engine as it was."""
        ...


class EngineGradients(Protocol):
    """Gradients and steps of an engine that keeps them to itself, as one rank sees them; nothing is sent."""

    def steps_now(self) -> bool:
        """Return whether the engine's next step changes weights; the same on all ranks."""
        ...

    def gradients(self) -> list[Tensor]:
        """Return what this rank holds of the gradients."""
        ...

    def known_bad(self) -> bool:
        """Return whether the engine itself has found a bad value in this rank's part."""
        ...

    def skip_step(self) -> None:
        """Have the engine skip its next optimizer step; on all ranks alike."""
        ...

    def loss_scale(self) -> tuple[float, float] | None:
        """Return the loss scale and its floor; ``None`` where the loss is not scaled."""
        ...

    def why_skips_are_too_many(self) -> str | None:
        """Return what is not ordinary about the steps skipped so far; the same on all ranks."""
        ...


@runtime_checkable
class HasEngineGradients(Protocol):
    """A strategy whose engine keeps the gradients, a part of them on each rank, and makes the optimizer steps."""

    def engine_gradients(self) -> EngineGradients:
        """Return what this rank holds of the gradients, once the engine is set up for a fit."""
        ...


class EngineTrials(Protocol):
    """Steps that the engine of a strategy makes on one rank alone, to see whether they fit into memory."""

    def why_size_is_fixed(self) -> str:
        """Return why the batch size of a run cannot be changed, or nothing; the same on all ranks."""
        ...

    def why_accumulation_is_fixed(self) -> str:
        """Return why the number of accumulated batches cannot be changed, or nothing; the same on all ranks."""
        ...

    def why_not_possible(self) -> str:
        """Return why the engine cannot make a step on one rank alone, or nothing; the same on all ranks."""
        ...

    def state(self) -> EngineState:
        """Return all that steps of the engine change, to put back."""
        ...

    def alone(self, *, accumulates: bool) -> AbstractContextManager[int]:  # batches in a step
        """Let the engine make steps in the body whose collectives are answered on this rank."""
        ...

    def take_sizes(self, *, batch_size: int, accumulate: int) -> None:
        """Let the engine go on with so many samples of a rank in a batch, batches in a step; all alike."""
        ...


class EngineState(Protocol):
    """State of an engine as it was when the object was made."""

    def restore_structure(self) -> None:
        """Put back everything but the values of tensors."""
        ...

    def restore(self) -> None: ...


@runtime_checkable
class HasEngineTrials(Protocol):
    """A strategy whose engine makes the steps, and can make them on one rank alone to see what memory they need."""

    @property
    def engine_trials(self) -> EngineTrials:
        """Steps of the engine on one rank alone."""
        ...
