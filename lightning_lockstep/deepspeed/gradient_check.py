"""Where DeepSpeed's engine keeps the gradients of this rank, and how it is made to skip an optimizer step.

DeepSpeed has public functions for one whole gradient, which gather it from all ranks. What each step needs is the part
of all gradients that lies on this rank, which its optimizers keep in places of their own. Each place is looked for by
what an optimizer has; one that has none of them is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep._doors.deepspeed_internals import (
    bf16_gradients,
    checking_overflow,
    divided_gradients,
    finding_overflow,
    fp16_groups,
    has_local_overflow,
    kind_of_optimizer,
    let_gradients_go,
    partition_gradients,
    set_overflow,
    torch_scaler_of_engine,
)
from lightning_lockstep.deepspeed.loss_scale import LossScaleHistory, read_step
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import put_in_place

__all__ = ["GradientsOfEngine"]


class GradientsOfEngine:
    """Gradients and optimizer steps of a DeepSpeed engine, as one rank sees them."""

    def __init__(self, engine: Any, history: LossScaleHistory | None = None) -> None:
        self._engine, self._history = engine, history
        self._gradients, self._skip_step = _ways(engine)

    def steps_now(self) -> bool:
        """Return whether the engine's next ``step()`` changes weights, and not only counts an accumulated batch."""
        return bool(self._engine.is_gradient_accumulation_boundary())

    def gradients(self) -> list[Tensor]:
        """Return what this rank holds of the gradients accumulated so far; the same tensors at every step if it can."""
        return list(self._gradients())

    def known_bad(self) -> bool:
        """Return whether the engine itself has found a bad value in this rank's part, as it does when offloading."""
        return has_local_overflow(self._engine.optimizer)

    def skip_step(self) -> None:
        """Have the engine skip its next optimizer step as after an overflow of its own.

        Weights and the optimizer's state stay, gradients are let go, the skip is counted, a dynamic loss scale
        falls.
        """
        if self._history is not None:
            self._history.expect_skip()
        self._skip_step()

    def loss_scale(self) -> tuple[float, float] | None:
        """Return the loss scale and its floor (``min_loss_scale``, else 0); ``None`` where the loss is not scaled."""
        outcome = read_step(self._engine)
        if outcome is None or outcome.scale is None:
            return None
        return outcome.scale, outcome.floor or 0.0

    def why_skips_are_too_many(self) -> str | None:
        """Return what is not ordinary about the steps skipped so far; the same on every rank."""
        return None if self._history is None else self._history.verdict()


def _ways(engine: Any) -> tuple[Callable[[], Iterator[Tensor]], Callable[[], None]]:
    """Return how to get at this rank's gradients, and how to skip a step."""
    optimizer = engine.optimizer
    kind = kind_of_optimizer(optimizer)
    if kind == "stage 3":
        return lambda: iter([divided_gradients(optimizer)]), lambda: _overflow_once(optimizer)
    if kind == "stages 1 and 2":
        return lambda: partition_gradients(optimizer), lambda: _overflow_once(optimizer)
    if kind == "bf16":
        groups = bf16_gradients(optimizer)
        return lambda: (g for group in groups for g in group), lambda: _step_once(optimizer)
    if kind == "fp16":
        return lambda: _whole(fp16_groups(optimizer)), lambda: _found_once(optimizer)
    if kind is None and isinstance(optimizer, Optimizer):  # stage 0, float32
        return lambda: _whole(_groups(optimizer)), lambda: _without_gradients(engine, optimizer)
    raise ConfigurationError(
        f"OverflowDetector does not know where {type(optimizer).__name__} of this DeepSpeed keeps gradients."
        " Use DeepSpeed 0.19, another stage of ZeRO, or strategy='lockstep_ddp' to find the overflow."
    )


def _groups(optimizer: Optimizer) -> list[list[Tensor]]:
    return [group["params"] for group in optimizer.param_groups]


def _whole(groups: list[list[Tensor]]) -> Iterator[Tensor]:
    return (g for group in groups for parameter in group if (g := parameter.grad) is not None)


# Each of these acts on the next step alone, and takes itself away.


def _overflow_once(optimizer: Any) -> None:
    """Let the method by which ZeRO's optimizer looks for an overflow report one, once."""
    undo = ExitStack()

    def found(*args: Any, **kwargs: Any) -> bool:
        undo.close()
        set_overflow(optimizer, True)
        return True

    for name, value in finding_overflow(optimizer, found).items():
        undo.callback(put_in_place(optimizer, name, value))


def _found_once(optimizer: Any) -> None:
    undo = ExitStack()

    def found(*args: Any, **kwargs: Any) -> bool:
        undo.close()
        return True

    checker, values = checking_overflow(optimizer, found)
    for name, value in values.items():
        undo.callback(put_in_place(checker, name, value))


def _step_once(optimizer: Any) -> None:
    def step(*args: Any, **kwargs: Any) -> None:
        put_back()
        set_overflow(optimizer, True)
        let_gradients_go(optimizer)

    put_back = put_in_place(optimizer, "step", step)


def _without_gradients(engine: Any, optimizer: Optimizer) -> None:
    """Without gradients a plain optimizer changes nothing; torch's loss scaler needs to see that they are bad."""
    scaled = torch_scaler_of_engine(engine) is not None
    for group in _groups(optimizer):
        for parameter in group:
            if not scaled:
                parameter.grad = None
            elif parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.fill_(float("nan"))
