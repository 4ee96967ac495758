"""Small models for the tests of LockstepFSDPStrategy, and fits of them on several ranks and on one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import LockstepFSDPStrategy
from lightning_lockstep._lightning import LightningModule, Trainer, seed_everything
from tests import harness
from tests.harness import on_device

QUIET: dict[str, Any] = {
    **harness.QUIET,
    "accelerator": "cpu",
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
}


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def reset_parameters(self) -> None:
        self.calls.zero_()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        return x + self.linear(self.norm(x)).relu()


class Net(LightningModule):
    """Two blocks between layers that are in no unit, and a parameter of the module itself."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.dtypes: set[str] = set()
        self.losses: list[float] = []
        self.make_layers(blocks)

    def make_layers(self, blocks: int = 2) -> None:
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 4, bias=False)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            self.dtypes.add(str(x.dtype).removeprefix("torch."))
        outputs: Tensor = self.head(x) * self.temperature
        return outputs

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs: Tensor = self(batch[0])
        return outputs

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.01)


class LogsLoss(Net):
    """It reads no tensor itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


def rows(count: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(0, 4, (count,), generator=generator))


def loader(ranks: int, *, batch: int = 8, count: int = 32) -> DataLoader[Any]:
    """This rank's share of each batch of this many rows."""
    rank = int(os.environ.get("RANK", 0)) if ranks > 1 else 0
    share = batch // ranks
    mine = [start + rank * share + i for start in range(0, count, batch) for i in range(share)]
    return DataLoader(torch.utils.data.Subset(rows(count), mine), share)


def fit(make: Callable[[], LightningModule], ranks: int, strategy: Any = None, **options: Any) -> Trainer:
    """Fit a new model; without a strategy on this process alone."""
    seed_everything(7, verbose=False)
    trainer = Trainer(
        **{**QUIET, **on_device(ranks), "max_epochs": 2, **options},
        strategy=strategy if strategy is not None else "auto",
    )
    trainer.fit(make(), loader(ranks))
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Whole weights; on rank 0 alone where each rank has a part. Ranks: all, together."""
    state = trainer.strategy.lightning_module_state_dict()
    return {
        name.replace("_orig_mod.", ""): value.detach().clone()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two states of one model; infinity if their names differ."""
    if one.keys() != other.keys():
        return float("inf")
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def fsdp(**options: Any) -> LockstepFSDPStrategy:
    return LockstepFSDPStrategy(**{"shard": "Block", **options})
