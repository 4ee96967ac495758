"""Fits of a small module on any number of ranks, each with the same global batch: what must not depend on the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_lockstep import EffectiveBatchSize
from tests.harness import QUIET, on_device

GLOBAL_BATCH, EPOCHS, TOKENS = 16, 3, 64


class Net(LightningModule):
    """Learns from samples, or from as many tokens of each sample as it has."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        counts: bool = False,
        items: Callable[[int, int], float | None] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        self.counts, self.items = counts, items

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets, lengths = batch
        if not self.counts:
            return nn.functional.cross_entropy(self.body(inputs[:, 0]), targets[:, 0])
        count: float | None = int(lengths.sum())
        if self.items is not None:
            count = self.items(self.global_rank, batch_idx)
        real = torch.arange(inputs.shape[1]) < lengths[:, None]
        loss = nn.functional.cross_entropy(self.body(inputs[real]), targets[real])
        return loss if count is None else {"loss": loss, "num_items": count}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.3, momentum=0.9)


def samples(count: int, dtype: torch.dtype) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, TOKENS, 4, generator=generator, dtype=dtype),
        torch.randint(0, 3, (count, TOKENS), generator=generator),
        torch.randint(1, TOKENS + 1, (count,), generator=generator),
    )


def fitted(
    strategy: Any,
    count: int,
    accumulate: int,
    dtype: torch.dtype = torch.float64,
    *,
    counts: bool = False,
    items: Callable[[int, int], float | None]
    | None = None,  # of rank and batch, instead of the number there is
    own_lengths: bool = False,  # each rank has a loader of its own, rank 1's with fewer samples
    **options: Any,
) -> tuple[int, dict[str, Tensor]]:
    """Return the optimizer steps and the weights after a fit. Ranks: all, together."""
    ranks = int(os.environ.get("WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    seed_everything(3, verbose=False)
    count -= 8 * int(os.environ.get("RANK", "0")) if own_lengths else 0
    net, data = Net(dtype, counts=counts, items=items), samples(count, dtype)
    trainer = Trainer(
        **{
            **QUIET,
            **on_device(ranks),
            "strategy": strategy,
            "max_epochs": EPOCHS,
            "callbacks": [] if own_lengths else [EffectiveBatchSize(GLOBAL_BATCH)],
            "use_distributed_sampler": not own_lengths,
            **options,
        }
    )
    size = -(-GLOBAL_BATCH // (ranks * accumulate))
    trainer.fit(net, DataLoader(data, size, shuffle=True))
    state = trainer.strategy.lightning_module_state_dict()
    return trainer.global_step, {name: one.detach().clone() for name, one in state.items() if one is not None}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)
