"""What a strategy can do, asked of the strategy and never read from the name of its class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from lightning_lockstep._lightning import DDPStrategy, SingleDeviceStrategy, Strategy

__all__ = [
    "Capabilities",
    "RunsLater",
    "StatesCapabilities",
    "capabilities_of",
    "missing_capabilities",
]


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
    """A strategy that collects operations and runs them later; its devices have a random state of their own."""

    def sync(self) -> None:
        """Compile what was called and is pending, if it is new, and begin to run it; every process alike."""
        ...

    def device_seed(self) -> int:
        """Return the state of the devices' random numbers; nothing is read from a device."""
        ...

    def set_device_seed(self, seed: int) -> None:
        """Let the devices' random numbers go on from a state."""
        ...


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
