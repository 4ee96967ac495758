"""LockstepFSDPStrategy: what a Trainer and a module may ask for either works, with the weights of one process, or is
refused before a rank starts, with its reason."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lockstep import ConfigurationError, FP32Modules
from lightning_lockstep._doors.lightning import LightningModule, ModelCheckpoint, Trainer, WeightAveraging
from tests.helpers import run_ranks
from tests.strategies.fsdp_models import QUIET, Block, Net, difference, fit, fsdp, loader, weights

# -- What works: the weights after a fit on two ranks are those of one process with the same batches --


class Tied(Net):
    """Its first and its last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.first.weight


class TiedUnits(Net):
    """Two of its blocks share a weight, so neither can be divided alone."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.blocks[0].linear.weight = self.blocks[1].linear.weight


class OneBlockTwice(Net):
    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.blocks.append(self.blocks[0])


class Frozen(Net):
    """A whole block is frozen, and a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].norm.requires_grad_(False)


class Manual(Net):
    """Two optimizers that alternate, a backward for each, in manual optimization; no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.temperature
        self.temperature = 1.0
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        lower = [*self.first.parameters(), *self.blocks[0].parameters()]
        upper = [*self.blocks[1].parameters(), *self.head.parameters()]
        return [torch.optim.Adam(lower, 0.01), torch.optim.SGD(upper, 0.1)]


class Toggled(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class CompiledBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


class CompiledNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(nn.Sequential(*self.blocks), backend="eager")
        del self.blocks
        self.blocks = [self.body]


class MadeLater(Net):
    """Its layers come from ``configure_model``; on ``meta``, so that no rank ever holds all of it."""

    def __init__(self) -> None:
        LightningModule.__init__(self)

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        with torch.device("meta" if self.trainer.world_size > 1 else "cpu"):
            Net.__init__(self)


class OwnMeans(Net):
    """Calls its layers from the step, not by ``forward``."""

    def loss(self, batch: Any) -> Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x) * self.temperature, batch[1])


WORKS: dict[str, tuple[type[Net] | Callable[[], Net], dict[str, Any], dict[str, Any]]] = {
    # what: (model, options of the strategy, of the Trainer)
    "shard by size": (Net, {"shard": "auto"}, {}),
    "shard by class": (Net, {}, {}),
    "shard by classes": (Net, {"shard": ["Block", "Linear"]}, {}),
    "shard by a function": (Net, {"shard": lambda name, module: name == "blocks.1"}, {}),
    "whole parameters kept until the backward": (Net, {"reshard_after_forward": False}, {}),
    "offload": (Net, {"offload": "cpu"}, {}),
    "activation checkpointing": (Net, {"activation_checkpointing": True}, {}),
    "replicas": (Net, {"mesh": {"replicate": 2}}, {}),
    "layers called from the step": (OwnMeans, {}, {}),
    "shared weights": (Tied, {}, {}),
    "shared weights of units": (TiedUnits, {"shard": "auto"}, {}),
    "a block used twice": (OneBlockTwice, {}, {}),
    "frozen parameters": (Frozen, {}, {}),
    "manual optimization, several optimizers": (Manual, {}, {}),
    "optimizers toggled": (Toggled, {}, {}),
    "compiled blocks": (CompiledBlocks, {}, {}),
    "a compiled part": (CompiledNet, {}, {}),
    "clipping by norm": (Net, {}, {"gradient_clip_val": 0.1}),
    "clipping by value": (Net, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulated gradients": (Net, {}, {"accumulate_grad_batches": 2}),
    "accumulated gradients, kept whole": (
        Net, {"reshard_after_forward": False}, {"accumulate_grad_batches": 2}
    ),
}


def working_fits() -> dict[str, Any]:
    answers: dict[str, Any] = {}
    from lightning_lockstep.strategies import fsdp_units
    fsdp_units.LEAST_UNIT = 100
    for name, (make, options, settings) in WORKS.items():
        try:
            reference = weights(fit(make, 1, **settings))
            trainer = fit(make, 2, fsdp(**options), **settings)
            found = weights(trainer)
            answers[name] = difference(reference, found) if trainer.is_global_zero else 0.0
        except Exception:
            answers[name] = traceback.format_exc()[-3000:]
    return answers


@pytest.fixture(scope="module")
def worked() -> Any:
    return run_ranks(2, working_fits, backend=None, timeout=240)


@pytest.mark.parametrize("what", WORKS)
def test_a_fit_has_the_weights_of_one_process(what: str, worked: list[dict[str, Any]]) -> None:
    for rank in worked:
        assert isinstance(rank[what], float), rank[what]
        assert rank[what] < 1e-5
