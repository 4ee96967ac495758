"""A plain program on any number of ranks; what it prints depends on their number under Lightning's ``ddp``.

    python examples/same_run/any_ranks.py --strategy ddp --ranks 3
    python examples/same_run/any_ranks.py --strategy lockstep_ddp --ranks 3

It tests a module on 13 samples, and then trains it on 101 for three epochs with a global batch of 16; see
docs/same-run.md. ``scripts/pictures any-ranks`` draws what it prints.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_lockstep import EffectiveBatchSize

GLOBAL_BATCH = 16


class Classifier(pl.LightningModule):
    """A linear layer that knows most classes from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False)
        nn.init.eye_(self.layer.weight)
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the mean loss and the accuracy over all batches."""
        outputs = self.layer(batch[0])
        self.log("loss", nn.functional.cross_entropy(outputs, batch[1]), sync_dist=True)
        self.accuracy(outputs, batch[1])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def samples(count: int) -> TensorDataset:
    """Points of three classes that overlap, the same on every rank."""
    generator = torch.Generator().manual_seed(count)
    classes = torch.arange(count) % 3
    points = torch.randn(count, 4, generator=generator)
    points[torch.arange(count), classes] += 1.2
    return TensorDataset(points, classes)


def main() -> None:
    """Test, train, and print one line of results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="lockstep_ddp", help="ddp, lockstep_ddp or another name")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    options: dict[str, Any] = {"accelerator": "cpu", "devices": given.ranks, "strategy": given.strategy}
    trainer = pl.Trainer(
        **options,
        callbacks=[EffectiveBatchSize(GLOBAL_BATCH)],
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pl.seed_everything(1)
    module = Classifier()
    (found,) = trainer.test(module, DataLoader(samples(13), 4), verbose=False)
    trainer.fit(module, DataLoader(samples(101), -(-GLOBAL_BATCH // given.ranks), shuffle=True))
    if trainer.is_global_zero:
        weight = module.layer.weight[0, 0]
        print(
            f"{given.strategy} on {given.ranks}: accuracy {found['accuracy']:.6f}, loss {found['loss']:.6f},"
            f" a weight after training {weight:.6f}"
        )


if __name__ == "__main__":
    main()
