"""Fits with augmentation, dropout and batch norm: what must not depend on ranks, workers or accumulation."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_lockstep import EffectiveBatchSize
from tests.harness import QUIET, on_device

GLOBAL_BATCH, EPOCHS = 16, 2
OF_SAMPLE: dict[str, Any] = {"random_numbers": "of_sample", "batch_norm": "of_batch"}


class Images(Dataset[Any]):
    """Cropped by Python's numbers, flipped by numpy's, with noise of torch's."""

    def __init__(self, count: int) -> None:
        self._x = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        left, top = random.randrange(4), random.randrange(4)
        x = self._x[index, :, left : left + 9, top : top + 9]
        if numpy.random.rand() < 0.5:
            x = x.flip(-1)
        return x + 0.1 * torch.randn(x.shape), index % 4


class Words(Images):
    """Windows of a text whose beginning is drawn, with words masked."""

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        words = (self._x[index].flatten() * 10).long().remainder(29)[random.randrange(8) :][:11]
        return torch.where(torch.rand(11) < 0.1, 29, words), words


def collated(samples: list[Any]) -> tuple[Tensor, Tensor, float]:
    """Return a batch with one random number for all of it."""
    x, y = zip(*samples, strict=True)
    return torch.stack(x), torch.as_tensor(y) if isinstance(y[0], int) else torch.stack(y), random.random()


class Block(nn.Module):
    """A residual block with dropout of channels and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.1)
        )
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        kept = 1.0
        if self.training:
            kept = (torch.rand(len(x), 1, 1, 1, device=x.device) < 0.8).to(x.dtype) / 0.8
        return F.relu(self.inner(x) * kept + self.norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, 16), nn.Parameter(torch.randn(11, 16) * 0.1)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(16, 30)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.words(x) + self.places)
        for layer in self.layers:
            y = checkpoint(layer, y, use_reentrant=False)
        return self.head(y).transpose(1, 2)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "transformer":
        return Transformer()
    layers = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Block(), Block()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8, 4))


class Net(LightningModule):
    """Learns from images or words; the loss is scaled by the random number of the batch, and by one of the step."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net, self.case = made(case.kind), case

        self.automatic_optimization = not case.manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.case.manual:
            return self.loss(*batch)
        for optimizer in self.optimizers():
            loss = self.loss(*batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return None

    def loss(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        return F.cross_entropy(self.net(x), y) * (0.5 + scale + random.random())

    def configure_optimizers(self) -> Any:
        made = [torch.optim.AdamW(self.parameters(), 3e-3) for _ in range(1 + self.case.manual)]
        return made if self.case.manual else made[0]


class Case(NamedTuple):
    kind: str
    samples: int
    micro_batches: int = 1  # of an optimizer step
    workers: int = 0
    precision: Any = "64-true"
    manual: bool = False  # optimization, with two steps of a batch
    whole: bool = False  # batches of a batch sampler of the program's own, which stay whole
    stop: int = -1  # the optimizer step after which the fit ends


def trained(
    strategy: Any, case: Case, *, path: str = "", callbacks: Sequence[Any] = (), **options: Any
) -> dict[str, Tensor]:
    """Return weights and statistics after a fit, resumed if it does not stop and has a path. Ranks: all, together."""
    ranks = int(os.environ.get("WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    seed_everything(1, verbose=False)
    net = Net(case)
    trainer = Trainer(
        **{
            **QUIET,
            **on_device(ranks),
            "strategy": strategy,
            "precision": case.precision,
            "max_epochs": EPOCHS,
            "max_steps": case.stop,
            "accumulate_grad_batches": 4 // ranks if case.whole else 1,
            "callbacks": [
                *([] if case.manual or case.whole else [EffectiveBatchSize(GLOBAL_BATCH)]),
                *callbacks,
            ],
            **options,
        }
    )
    data, size = (Words if case.kind == "transformer" else Images)(case.samples), ranks * case.micro_batches
    how: dict[str, Any] = {"batch_size": -(-GLOBAL_BATCH // size), "shuffle": True}
    if case.whole:
        how = {"batch_sampler": [list(range(first, first + 4)) for first in range(0, case.samples - 3, 4)]}
    loader = DataLoader(
        data,
        **how,
        collate_fn=collated,
        num_workers=case.workers,
        persistent_workers=case.workers > 0,
    )
    trainer.fit(net, loader, ckpt_path=path if path and case.stop < 0 else None)
    if path and case.stop >= 0:
        trainer.save_checkpoint(path)
    state = trainer.strategy.lightning_module_state_dict()
    return {name: one.detach().clone() for name, one in state.items() if one is not None}


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two states; one of FSDP is empty but on rank 0."""
    return max((float((one[name].double() - other[name].double()).abs().max()) for name in one), default=0.0)
