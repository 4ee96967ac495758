"""Two ranks with a plain Trainer and no Hydra.

    pip install '.[demo]'                # scikit-learn, which has the images
    python examples/plain_trainer.py

Importing `lightning_lockstep` is all it takes to make the strategy's name known.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_lockstep  # noqa: F401  registers "lockstep_ddp"


class Net(LightningModule):
    """One hidden layer on 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy [nats]."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss, sync_dist=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    """Train for three epochs; every rank runs this function."""
    seed_everything(1)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    # 1,797 images: each is used once in an epoch, though the ranks cannot have as many of the last batch.
    loader = DataLoader(data, batch_size=32, shuffle=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="lockstep_ddp",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), loader)
    if trainer.is_global_zero:
        print(f"final train_loss {trainer.callback_metrics['train_loss']:.3f} on {trainer.world_size} ranks")


if __name__ == "__main__":
    main()
