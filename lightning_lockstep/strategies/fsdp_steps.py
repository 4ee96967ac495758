"""What callbacks see of the steps of a divided model, and steps on one rank alone, to see what memory they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep.distributed.sharded_state import parameters_of
from lightning_lockstep.distributed.sharding import can_drop_steps, drop_step, own_gradients
from lightning_lockstep.steps.capabilities import EngineGradients, EngineTrials
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.steps.snapshot import OptimizerState, ScalerState, Snapshot, StoredCopies


class DividedGradients(EngineGradients):
    """Gradients of which each rank has a part, and steps of their optimizers, as one rank sees them."""

    def __init__(self, strategy: Any) -> None:
        self._module, self._precision = strategy.lightning_module, strategy.precision_plugin

    def gradients(self) -> list[Tensor]:
        """Return this rank's parts, and whole gradients that wait for a reduction."""
        return own_gradients(self._module)

    def skip_step(self, optimizer: Optimizer) -> None:
        """Let the next step of an optimizer change nothing: it gets no gradients."""
        for parameter in parameters_of(optimizer):
            parameter.grad = None

    def loss_scale(self) -> tuple[float, float] | None:
        scaler = getattr(self._precision, "scaler", None)
        return None if scaler is None else (float(scaler.get_scale()), 0.0)


class TrialsOfParts(EngineTrials):
    """Steps on one rank alone, whose collectives are answered there, to see whether they fit into memory."""

    # What is gathered then is not the model, but as large.

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def why_not_possible(self) -> str:
        if can_drop_steps():
            return ""
        return f"torch {torch.__version__} cannot clean up after a step that ran out of memory (2.13 can)"

    def state(self) -> StateOfParts:
        return StateOfParts(self._strategy)

    @contextmanager
    def alone(self, *, accumulates: bool) -> Iterator[int]:
        """Let the body make steps; yields how many batches make one: whole gradients are kept after the first."""
        strategy = self._strategy
        several = accumulates or strategy.lightning_module.trainer.accumulate_grad_batches > 1
        keeps_whole = partial(type(strategy).block_backward_sync, strategy)
        with replaced(strategy, block_backward_sync=keeps_whole):
            yield 2 if several else 1


class StateOfParts(Snapshot):
    """This rank's parts of a model and its optimizers as they were when the object was made."""

    def __init__(self, strategy: Any) -> None:
        self._module, scaler = strategy.lightning_module, getattr(strategy.precision_plugin, "scaler", None)
        super().__init__(
            *map(OptimizerState, strategy.optimizers),
            *(() if scaler is None else (ScalerState(scaler),)),
            StoredCopies([*self._module.parameters(), *self._module.buffers()]),
        )

    def restore_structure(self) -> None:
        """Put back what is gathered: nothing."""
        drop_step(self._module)

    def restore(self) -> None:
        self.restore_structure()
        super().restore()
