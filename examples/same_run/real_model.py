"""A residual network with augmentation, batch norm and dropout, on any number of ranks.

    python examples/same_run/real_model.py --strategy ddp --ranks 1 2 3
    python examples/same_run/real_model.py --strategy lockstep_ddp --ranks 1 2 3

It learns handwritten digits for ten epochs with a global batch of 60, and prints how many of the others it knows.
``scripts/pictures real-model`` draws what it prints.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.demo import DigitsData


class Block(nn.Module):
    """Two convolutions, beside which the input goes on."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Dropout2d(0.1),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return what is seen in ``x``, of shape ``(batch, channels, height, width)``, added to it."""
        return torch.relu(x + self.inner(x))


class Residual(pl.LightningModule):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        last = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 10)
        self.net = nn.Sequential(*first, Block(16), nn.AvgPool2d(2), Block(16), *last)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log how many samples of all batches are known."""
        known = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", known, on_epoch=True, batch_size=len(batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def known(strategy: str, ranks: int) -> float:
    """Train and test on this many ranks, and return the test accuracy."""
    made: Any = "ddp_fork"
    if strategy == "lockstep_ddp":
        made = LockstepDDPStrategy(start_method="fork", random_numbers="of_sample", batch_norm="of_batch")
    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=made,
        max_epochs=10,
        precision="64-true",  # in float32 the runs would part, by rounding, in the course of thousands of steps
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, data = Residual(), DigitsData(global_batch_size=60, test_fraction=0.5, augment=True)
    trainer.fit(module, data)
    (found,) = trainer.test(module, data, verbose=False)
    return found["accuracy"]


def main() -> None:
    """Print a line of results for each number of ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="lockstep_ddp", choices=["ddp", "lockstep_ddp"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    for ranks in given.ranks:
        print(f"{given.strategy} on {ranks}: accuracy {known(given.strategy, ranks):.6f}", flush=True)


if __name__ == "__main__":
    main()
