"""The app's model and data."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Points(LightningDataModule):
    """64 points on a line.

    Args:
        batch_size: Points per rank.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """In order."""
        x = torch.linspace(-1, 1, 64).unsqueeze(1)
        return DataLoader(TensorDataset(x, 2 * x + 1), batch_size=self.batch_size)


class Line(LightningModule):
    """A slope and an offset.

    Args:
        learning_rate: Step size of SGD.
    """

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)
