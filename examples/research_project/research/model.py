"""A small network for tables."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Accuracy


class TableNet(LightningModule):
    """Two layers on standardised columns.

    Args:
        columns: Columns of the table.
        classes: Classes to tell apart.
        width: Hidden units.
        learning_rate: Step size of Adam.
    """

    def __init__(self, *, columns: int, classes: int, width: int = 32, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, classes))
        # torchmetrics adds up over all ranks when the value is asked for.
        self.val_acc = Accuracy(task="multiclass", num_classes=classes)
        self.test_acc = Accuracy(task="multiclass", num_classes=classes)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits `(batch, classes)` of rows `(batch, columns)`."""
        logits: Tensor = self.layers(rows)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy [nats]."""
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy over all ranks."""
        logits = self(batch[0])
        self.val_acc(logits, batch[1])
        self.log("val_acc", self.val_acc)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log accuracy over all ranks."""
        self.test_acc(self(batch[0]), batch[1])
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
