"""What callbacks see of the steps of a divided model, and steps on one rank alone, to see what memory they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep.distributed.sharding import can_drop_steps, drop_step, own_gradients
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.steps.snapshot import OptimizerState, ScalerState, Snapshot, StoredCopies


class DividedGradients:
    """Gradients of which each rank has a part, and steps of their optimizers, as one rank sees them."""

    def __init__(self, strategy: Any) -> None:
        self._module, self._precision = strategy.lightning_module, strategy.precision_plugin

    def steps_now(self) -> bool:
        """Return whether the next step changes weights: the Trainer makes no other."""
        return True

    def gradients(self) -> list[Tensor]:
        """Return this rank's parts, and whole gradients that wait for a reduction."""
        return own_gradients(self._module)

    def known_bad(self) -> bool:
        """Return whether a bad value is known without a look at the gradients."""
        return False

    def skip_step(self, optimizer: Optimizer) -> None:
        """Let the next step of an optimizer change nothing: it gets no gradients."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def loss_scale(self) -> tuple[float, float] | None:
        """Return the loss scale and its floor; ``None`` where the loss is not scaled."""
        scaler = getattr(self._precision, "scaler", None)
        return None if scaler is None else (float(scaler.get_scale()), 0.0)

    def why_skips_are_too_many(self) -> str | None:
        """Return what is not ordinary about the steps skipped so far: of a loss scaler, nothing."""
        return None


class TrialsOfParts:
    """Steps on one rank alone, whose collectives are answered there, to see whether they fit into memory."""

    # What is gathered then is not the model, but as large.

    def __init__(self, strategy: Any) -> None:
        self._strategy, self._module = strategy, strategy.lightning_module

    def why_size_is_fixed(self) -> str:
        """Return why the batch size of a run cannot be changed: nothing fixes it."""
        return ""

    def why_accumulation_is_fixed(self) -> str:
        """Return why the number of accumulated batches cannot be changed: nothing fixes it."""
        return ""

    def why_not_possible(self) -> str:
        """Return why no step can be made on one rank alone, or nothing."""
        if can_drop_steps():
            return ""
        return f"torch {torch.__version__} cannot clean up after a step that ran out of memory (2.13 can)"

    def state(self) -> StateOfParts:
        """Return all that steps change, to put back."""
        return StateOfParts(self._strategy)

    @contextmanager
    def alone(self, *, accumulates: bool) -> Iterator[int]:
        """Let the body make steps; yields how many batches make one: whole gradients are kept after the first."""
        several = accumulates or self._module.trainer.accumulate_grad_batches > 1
        keeps_whole = partial(type(self._strategy).block_backward_sync, self._strategy)
        with replaced(self._strategy, block_backward_sync=keeps_whole):
            yield 2 if several else 1

    def take_sizes(self, *, batch_size: int, accumulate: int) -> None:
        """Go on with other sizes: nothing but the Trainer counts by them."""


class StateOfParts:
    """This rank's parts of a model and its optimizers as they were when the object was made."""

    def __init__(self, strategy: Any) -> None:
        self._module, scaler = strategy.lightning_module, getattr(strategy.precision_plugin, "scaler", None)
        self._values = Snapshot(
            *(OptimizerState(optimizer) for optimizer in strategy.optimizers),
            *(() if scaler is None else (ScalerState(scaler),)),
            StoredCopies([*self._module.parameters(), *self._module.buffers()]),
        )

    def restore_structure(self) -> None:
        """Put back what is gathered: nothing."""
        drop_step(self._module)

    def restore(self) -> None:
        """Put back all of it."""
        self.restore_structure()
        self._values.restore()
