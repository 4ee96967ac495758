"""Forward and backward passes that DeepSpeed's engine does not notice, as a replay or a trial needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._doors.deepspeed_internals import autocast_dtype, divides_parameters
from lightning_lockstep._lightning import LightningModule, Precision
from lightning_lockstep.deepspeed.loss_scale import read_step
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.steps.stand_ins import stand_in_parameters

__all__ = ["without_engine"]


@contextmanager
def without_engine(strategy: Any, module: LightningModule, engine: Any) -> Iterator[None]:
    """Let the strategy's forward and backward be those of torch, in the precision that the engine would use.

    In stages 0 to 2 of ZeRO parameters are replaced by others that share their memory. In stage 3 they stay,
    and are gathered module by module as in training, by all ranks together; their gradients are computed and
    let go. Either way no gradient reaches the engine.
    """
    divided = divides_parameters(engine)
    with (
        _divided_parameters(module, engine) if divided else stand_in_parameters(module),
        _plain_precision(strategy, engine),
    ):
        yield


@contextmanager
def _plain_precision(strategy: Any, engine: Any) -> Iterator[None]:
    """Let the strategy have a precision plugin that does not go through the engine."""
    plugin = strategy.precision_plugin
    strategy.precision_plugin = PlainPrecision(plugin, engine)
    try:
        yield
    finally:
        strategy.precision_plugin = plugin


@contextmanager
def _divided_parameters(module: LightningModule, engine: Any) -> Iterator[None]:
    """Let a backward of the body compute gradients of divided parameters without accumulating them."""

    def backward(loss: Tensor, *args: Any, gradient: Tensor | None = None, **kwargs: Any) -> None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # After all other hooks of a parameter: so that whole gradients of all of them are never there together.
        handles = [parameter.register_hook(_emptied) for parameter in parameters]  # type: ignore[no-untyped-call]
        try:
            # Unlike backward() it runs none of the hooks by which gradients are reduced.
            torch.autograd.grad(loss, parameters, gradient, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()

    with replaced(module, backward=backward):
        yield
    engine.empty_partition_cache()  # what a module gathers that nothing runs backward through stays whole


def _emptied(gradient: Tensor) -> Tensor:
    """Return zeros of the same shape that take no memory."""
    return gradient.new_zeros(()).expand_as(gradient)


class PlainPrecision(Precision):
    """Autocast and loss scaling as the engine's configuration asks for them, without the engine."""

    def __init__(self, plugin: Precision, engine: Any) -> None:
        super().__init__()
        self.precision = plugin.precision
        self._plugin, self._engine = plugin, engine
        outcome = read_step(engine)
        self._scale = 1.0 if outcome is None or outcome.scale is None else outcome.scale

    def convert_input(self, data: Any) -> Any:
        return self._plugin.convert_input(data)

    def train_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override] # any context will do
        """Return the autocast that the engine enters around a forward, if any."""
        engine = self._engine
        dtype = autocast_dtype(engine)
        return nullcontext() if dtype is None else torch.autocast(engine.device.type, dtype=dtype)

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward pass of torch, with gradients multiplied by the loss scale."""
        if self._scale != 1:
            kwargs.setdefault("gradient", torch.full_like(tensor, self._scale))
        super().backward(tensor, model, optimizer, *args, **kwargs)
