"""What can be done to a step under a strategy, and which part of the Trainer does it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep._lightning import DDPStrategy, LightningModule, SingleDeviceStrategy, Strategy

# -- What a strategy can do, asked of the strategy and never read from the name of its class --


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What can be done with a training step of a strategy."""

    whole_gradients: bool = True  # after autograd's backward each rank holds whole gradients in .grad
    step_alone: bool = True  # one rank can make a step of the run by itself
    sees_out_of_memory: bool = True  # it is raised at the call that needs the memory
    # Otherwise operations are collected, and a value read within a step compiles a part of it.
    runs_at_once: bool = True
    # Who runs a recorded step again; together: each has a part of it.
    replays: Literal["alone", "together"] = "alone"


_WHY = {
    "whole_gradients": "it does not keep whole gradients in `.grad`, or its backward is not autograd's own",
    "step_alone": (
        "it divides the model or its optimizer among the ranks, reduces between their devices within the step, or"
        " runs the step itself, so a step on one rank alone would not be the step of the run"
    ),
    "sees_out_of_memory": (
        "it compiles and runs operations later than they are called, so running out of memory is not seen at the"
        " call that needs it"
    ),
    "runs_at_once": (
        "it collects operations and runs them later, so a value read in the middle of a step would stop it each time"
    ),
}


@runtime_checkable
class StatesCapabilities(Protocol):
    """A strategy that says itself what it can do; every strategy of this package does."""

    @property
    def step_capabilities(self) -> Capabilities: ...


@runtime_checkable
class RunsLater(Protocol):
    """A strategy that collects operations and runs them later; its devices have their own random state."""

    def sync(self) -> None:
        """Compile what was called and is pending, if it is new, and begin to run it; on every process."""

    def device_seed(self) -> int:
        """Return the state of the devices' random numbers; nothing is read from a device."""

    def set_device_seed(self, seed: int) -> None:
        """Let the devices' random numbers go on from a state."""


def capabilities_of(strategy: Strategy) -> Capabilities:
    """Return what a strategy can do: what it states itself, else what follows from what it is."""
    if isinstance(strategy, StatesCapabilities):
        return strategy.step_capabilities
    # DeepSpeed's strategy is a DDPStrategy by inheritance only: its engine makes the step.
    whole = (
        isinstance(strategy, (DDPStrategy, SingleDeviceStrategy))
        and not strategy.handles_gradient_accumulation
    )
    if not whole:
        return Capabilities(whole_gradients=False, step_alone=False)
    if strategy.root_device.type == "xla":
        return Capabilities(whole_gradients=False, sees_out_of_memory=False, runs_at_once=False)
    return Capabilities()


def missing_capabilities(strategy: Strategy, *needed: str) -> list[str]:  # names of fields
    """Return why a strategy cannot do what is needed, a reason each; empty when it can do all of it."""
    capabilities = capabilities_of(strategy)
    return [_WHY[name] for name in needed if not getattr(capabilities, name)]


# -- What a strategy offers whose engine makes the steps and keeps gradients to itself (DeepSpeed, FSDP), as
# protocols
#
# They let callbacks work with an engine that they know nothing of: their subpackages do not
# import its subpackage. What most of them answer stands here, for those that inherit.


@runtime_checkable
class StepsApart(Protocol):
    """A strategy whose engine makes the steps, and which can step aside for a step made apart from the run."""

    def steps_apart(self, module: LightningModule) -> AbstractContextManager[None]:
        """Let the body run ``module``, not wrapped, by autograd alone, and leave the engine as it was."""


class EngineGradients(Protocol):
    """Gradients and steps of an engine that keeps them to itself, as one rank sees them; nothing is sent."""

    def steps_now(self) -> bool:
        """Return whether the engine's next step changes weights; the same on all ranks."""
        return True

    def gradients(self) -> list[Tensor]:
        """Return what this rank holds of the gradients."""

    def known_bad(self) -> bool:
        """Return whether the engine itself has found a bad value in this rank's part."""
        return False

    def skip_step(self, optimizer: Optimizer) -> None:
        """Let the next step of an optimizer change nothing; on all ranks."""

    def loss_scale(self) -> tuple[float, float] | None:
        """Return the loss scale and its floor; ``None`` where the loss is not scaled."""

    def why_skips_are_too_many(self) -> str | None:
        """Return what is not ordinary about the steps skipped so far; the same on all ranks."""
        return None


@runtime_checkable
class HasEngineGradients(Protocol):
    """A strategy whose engine keeps the gradients, a part of them on each rank, and makes the optimizer steps."""

    def engine_gradients(self) -> EngineGradients:
        """Return what this rank holds of the gradients, once the engine is set up for a fit."""


class EngineTrials(Protocol):
    """Steps that the engine of a strategy makes on one rank alone, to see whether they fit into memory."""

    def why_size_is_fixed(self) -> str:
        """Return why the batch size of a run cannot be changed, or nothing; the same on all ranks."""
        return ""

    def why_accumulation_is_fixed(self) -> str:
        """Return why the number of accumulated batches cannot be changed, or nothing; the same on all ranks."""
        return ""

    def why_not_possible(self) -> str:
        """Return why the engine cannot make a step on one rank alone, or nothing; the same on all ranks."""

    def state(self) -> EngineState:
        """Return all that steps of the engine change, to put back."""

    def alone(self, *, accumulates: bool) -> AbstractContextManager[int]:  # batches in a step
        """Let the engine make steps in the body whose collectives are answered on this rank."""

    def take_sizes(self, *, batch_size: int, accumulate: int) -> None:
        """Let the engine go on with so many samples of a rank in a batch, batches in a step; the same on all."""
        return


class EngineState(Protocol):
    """State of an engine as it was when the object was made."""

    def restore_structure(self) -> None:
        """Put back everything but the values of tensors."""

    def restore(self) -> None: ...


@runtime_checkable
class HasEngineTrials(Protocol):
    """A strategy whose engine makes the steps, and can make them on one rank alone to see what memory they need."""

    @property
    def engine_trials(self) -> EngineTrials:
        """Steps of the engine on one rank alone."""
