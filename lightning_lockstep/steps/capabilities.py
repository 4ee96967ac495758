"""What can be done with a step under a strategy, which the strategy itself tells.

Callbacks also look for these attributes, which not every strategy has:

* ``engine_gradients()``: the :class:`StepGradients` of an engine that makes the steps (DeepSpeed, FSDP);
* ``engine_trials``: steps of the engine on one rank alone (``deepspeed/engine_trials.py``);
* ``steps_apart(module)``: a context in which autograd alone runs ``module``, and which leaves the engine as it was;
* ``sync()``, ``device_seed()`` and ``set_device_seed()``, if it collects operations and runs them later (XLA).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lockstep._lightning import DDPStrategy, SingleDeviceStrategy, Strategy


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What can be done with a training step of a strategy."""

    whole_gradients: bool = True  # after autograd's backward each rank holds whole gradients in .grad
    same_weights: bool = True  # ranks hold the same weights after each step
    step_alone: bool = True  # one rank can make a step of the run by itself
    sees_out_of_memory: bool = True  # it is raised at the call that needs the memory
    # If not, operations are collected, and reading a value within a step compiles and runs a part of it.
    runs_at_once: bool = True
    # Whether one rank can run a recorded step again, or all must, because each has a part of the model.
    replays: Literal["alone", "together"] = "alone"


_WHY = {
    "whole_gradients": "it does not keep whole gradients in `.grad`, or its backward is not autograd's own",
    "same_weights": "it averages the models only from time to time, so the weights of ranks differ in between",
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
    """Return what a strategy can do: what it states itself, or else what follows from its base classes."""
    if getattr(strategy, "_model_averaging_period", None):  # of a DDPStrategy
        return Capabilities(same_weights=False)
    stated: Capabilities | None = getattr(strategy, "step_capabilities", None)
    if stated is not None:
        return stated
    # DeepSpeed's strategy is a DDPStrategy by inheritance only: its engine makes the step.
    is_ddp = isinstance(strategy, (DDPStrategy, SingleDeviceStrategy))
    if not is_ddp or strategy.handles_gradient_accumulation:
        return Capabilities(whole_gradients=False, step_alone=False)
    if strategy.root_device.type == "xla":
        return Capabilities(whole_gradients=False, sees_out_of_memory=False, runs_at_once=False)
    return Capabilities()


def missing_capabilities(strategy: Strategy, *needed: str) -> list[str]:  # names of fields
    """Return why a strategy lacks what is needed, one reason for each; empty if it lacks nothing."""
    capabilities = capabilities_of(strategy)
    return [_WHY[name] for name in needed if not getattr(capabilities, name)]


class StepGradients:
    """Gradients, and the steps that optimizers make with them, as one rank sees them; nothing is sent.

    This is about gradients that autograd leaves in ``.grad``. A subclass is about those of an engine.
    """

    #: Whether this rank holds only a part of the gradients, or of what the engine knows of them.
    divided = False

    def __init__(self, module: nn.Module, precision: Any) -> None:
        self._module, self._precision = module, precision

    def steps_now(self) -> bool:
        """Return whether the next step changes weights, and not only counts an accumulated batch."""
        return True

    def gradients(self, optimizer: Optimizer | None = None) -> list[Tensor]:
        """Return what this rank holds of the gradients, those of one optimizer alone if they are told apart."""
        parameters: Iterable[Tensor] = self._module.parameters()
        if optimizer is not None:
            parameters = (one for group in optimizer.param_groups for one in group["params"])
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def known_bad(self) -> bool:
        """Return whether an engine itself has found a bad value in this rank's part."""
        return False

    def skip_step(self, optimizer: Optimizer) -> None:
        """Make the next step of an optimizer change nothing; to be called on all ranks."""
        optimizer.zero_grad()  # without gradients it changes nothing

    def loss_scale(self) -> tuple[float, float] | None:
        """Return the loss scale and its floor; ``None`` if the loss is not scaled."""
        scaler = getattr(self._precision, "scaler", None)
        return None if scaler is None else (float(scaler.get_scale()), 0.0)

    def why_skips_are_too_many(self) -> str | None:
        """Return why so many skipped steps are not ordinary, if they are not; the same on all ranks."""
        return None
