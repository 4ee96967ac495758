"""Small modules that run out of memory where and when a test says."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import AutoBatchSize, LockstepDDPStrategy
from tests.harness import QUIET, chosen_device, on_device

FULL = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes"


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, full: bool) -> torch.Tensor:
        ctx.full = full
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.full:
            raise RuntimeError(FULL)
        return grad, None


class WalledAdam(torch.optim.Adam):
    """An Adam whose step runs out of memory when told to."""

    full = False

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.full:
            raise RuntimeError(FULL)
        return loss


class Walled(pl.LightningModule):
    """Runs out of memory in ``where`` when a batch is larger than ``wall``, on rank ``on_rank`` or on all."""

    # ``only`` restricts that to batches of these indices.

    def __init__(
        self,
        wall: int = 10**9,
        *,
        where: str = "forward",
        on_rank: int | None = None,
        only: tuple[int, ...] | None = None,
        batch_size: int = 4,
        rows: int = 4000,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(20, 40)
        self.norm: nn.Module = nn.BatchNorm1d(40)
        self.middle, self.last = nn.Linear(40, 40), nn.Linear(40, 1)
        self.wall, self.where, self.on_rank, self.only = wall, where, on_rank, only
        self.batch_size, self.rows = batch_size, rows
        self.losses: list[float] = []
        self.sizes: list[int] = []

    def full(self, size: int, index: int | None = None) -> bool:
        here = self.on_rank is None or self.on_rank == self.trainer.global_rank
        return here and size > self.wall and (self.only is None or index in self.only)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        full = self.full(len(inputs), batch_idx)
        if full and self.where == "forward":
            raise RuntimeError(FULL)
        if self.where == "optimizer":
            self.trainer.strategy.optimizers[0].full = full
        hidden = self.norm(torch.relu(self.first(inputs)))
        hidden = _FailsInBackward.apply(hidden, full and self.where == "backward")
        loss = (self.last(torch.relu(self.middle(hidden))) - 1).pow(2).mean()
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (inputs,) = batch
        if self.full(len(inputs)):
            raise RuntimeError(FULL)
        self.sizes.append(len(inputs))

    test_step = predict_step = validation_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))
        self.sizes.append(len(batch[0]))

    def configure_optimizers(self) -> Any:
        return WalledAdam(self.parameters(), lr=0.01)

    def collate(self, samples: list[Any]) -> Any:
        if self.where == "collate" and self.full(len(samples)):
            raise MemoryError
        return (torch.stack([sample[0] for sample in samples]),)

    def loader(self) -> DataLoader[Any]:
        data = torch.randn(self.rows, 20, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=self.batch_size, collate_fn=self.collate)

    train_dataloader = loader
    val_dataloader = test_dataloader = predict_dataloader = lambda self: self.loader()


class PassedIn(Walled):
    """The same without loaders of its own."""

    train_dataloader = None  # type: ignore[assignment]
    val_dataloader = test_dataloader = predict_dataloader = None  # type: ignore[assignment]


class Mid(Walled):
    """Each micro-batch of more than ``fits`` samples runs out of memory in the batches of ``only``."""

    def __init__(self, *, fits: int, use_norm: bool = False, **kwargs: Any) -> None:
        super().__init__(fits, rows=15 * 24, batch_size=15, **kwargs)  # parts of 3 and 4 samples
        if not use_norm:
            self.norm = nn.Identity()


class FromLoader(pl.LightningModule):
    """Has neither a batch size nor a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class RunPeak(pl.Callback):
    """Peak of the memory in use in the run after the search, resident or of the card [bytes]."""

    peak = 0

    def on_train_start(self, run: Any, module: Any) -> None:
        if chosen_device() == "cuda":
            torch.cuda.reset_peak_memory_stats()
        Path("/proc/self/clear_refs").write_text("5")

    def on_train_end(self, run: Any, module: Any) -> None:
        if chosen_device() == "cuda":
            self.peak = torch.cuda.max_memory_allocated()
            return
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        self.peak = int(found.group(1)) * 1024


def largest(*settings: Any, **more: Any) -> Any:
    """An AutoBatchSize that trains with the size that fits, as Lightning's finder does."""
    return AutoBatchSize(*settings, **{"global_batch_size": "largest", **more})


def trainer(folder: Any, *callbacks: Any, **settings: Any) -> pl.Trainer:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the models are tiny, and ranks share few cores
    settings = {
        **on_device(settings.pop("devices", 1)),
        "max_steps": 2,
        **QUIET,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        **settings,
    }
    return pl.Trainer(default_root_dir=str(folder), callbacks=list(callbacks), **settings)


def of_two(folder: Any, *callbacks: Any, strategy: Any = None, **settings: Any) -> pl.Trainer:
    """The Trainer of two ranks."""
    return trainer(folder, *callbacks, devices=2, strategy=strategy or LockstepDDPStrategy(), **settings)
