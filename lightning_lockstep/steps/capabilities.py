"""What can be done to a step under a strategy, asked of the strategy and never read from the name of its class.

Callbacks ask a strategy for more by these attributes, which not every one has:

* ``engine_gradients()``: the :class:`EngineGradients` of an engine that makes the steps (DeepSpeed, FSDP);
* ``engine_trials``: steps of the engine on one rank alone (``deepspeed/engine_trials.py``);
* ``steps_apart(module)``: a context in which ``module`` is run by autograd alone, and the engine left as it was;
* ``sync()``, ``device_seed()`` and ``set_device_seed()``, if it collects operations and runs them later (XLA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep._lightning import DDPStrategy, SingleDeviceStrategy, Strategy


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


def capabilities_of(strategy: Strategy) -> Capabilities:
    """Return what a strategy can do: what it states itself, else what follows from what it is."""
    stated: Capabilities | None = getattr(strategy, "step_capabilities", None)
    if stated is not None:
        return stated
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


class EngineGradients:
    """Gradients and steps of an engine that keeps them to itself, as one rank sees them; nothing is sent."""

    def steps_now(self) -> bool:
        """Return whether the engine's next step changes weights; the same on all ranks."""
        return True

    def gradients(self) -> list[Tensor]:
        """Return what this rank holds of the gradients."""
        raise NotImplementedError

    def known_bad(self) -> bool:
        """Return whether the engine itself has found a bad value in this rank's part."""
        return False

    def skip_step(self, optimizer: Optimizer) -> None:
        """Let the next step of an optimizer change nothing; on all ranks."""
        raise NotImplementedError

    def loss_scale(self) -> tuple[float, float] | None:
        """Return the loss scale and its floor; ``None`` if the loss is not scaled."""
        return None

    def why_skips_are_too_many(self) -> str | None:
        """Return what is not ordinary about the steps skipped so far; the same on all ranks."""
        return None
