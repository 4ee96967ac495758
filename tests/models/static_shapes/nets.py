"""A small classifier whose steps count real samples only, and its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import StaticShapes
from lightning_lockstep._lightning import LightningModule, Trainer
from tests import harness

QUIET: dict[str, Any] = {**harness.QUIET, "accelerator": "cpu", "devices": 1, "max_epochs": 2}


class Net(LightningModule):
    """Notes the shapes of its batches; its labels may be -100, which cross entropy passes over."""

    def __init__(self, options: Mapping[str, Any] | None = None, *, asks: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        self.asks = asks
        self.compiled = torch.compile(self.layers, **options) if options is not None else self.layers
        self.shapes: list[tuple[str, int]] = []

    def step(self, batch: list[Tensor], stage: str) -> Tensor:
        rows, labels = batch
        self.shapes.append((stage, len(rows)))
        logits = self.compiled(rows)
        if not self.asks:
            return torch.nn.functional.cross_entropy(logits, labels)
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return StaticShapes.mean(losses, batch)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch, "training")
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.step(batch, "validation"))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.step(batch, "test"))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def values(self) -> Tensor:
        return torch.nn.utils.parameters_to_vector(self.layers.parameters()).detach()


def loader(samples: int, batch: int, seed: int = 3) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(rows, rows[:, :3].argmax(1)), batch)


def fitted(folder: Any, *callbacks: Any, net: Net | None = None, **options: Any) -> tuple[Trainer, Net]:
    """Fit 20 samples in batches of 6, and validate 11 in batches of 4."""
    net = net or Net()
    trainer = Trainer(**{**QUIET, "default_root_dir": folder, "callbacks": list(callbacks), **options})
    trainer.fit(net, loader(20, 6), loader(11, 4, seed=4))
    return trainer, net


def numbers(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
