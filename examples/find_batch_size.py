"""Find the largest batch under a memory limit, keep the global batch, and survive a batch that does not fit.

    python examples/find_batch_size.py                 # one process, 1 GiB
    python examples/find_batch_size.py --ranks 2 --memory-limit 900MiB --global-batch-size 4096

The folder outputs/ gets batch_size.json.
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import AutoBatchSize


class Net(LightningModule):
    """A layer with many activations: memory grows by about 0.3 MB a sample."""

    def __init__(self) -> None:
        super().__init__()
        width = 20_000
        self.layers = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 1))
        self.batch_size = 2  # of no account here: AutoBatchSize sets it, and the loader is made with it

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(20_000, 64)), self.batch_size, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1, help="processes on this host")
    parser.add_argument("--memory-limit", default="1GiB", help="most memory of a rank")
    parser.add_argument("--global-batch-size", type=int, help="of all ranks in one optimizer step; else what fits")
    given = parser.parse_args()
    finder = AutoBatchSize(
        memory_limit=given.memory_limit,
        global_batch_size=given.global_batch_size or "largest",
        on_oom="split",
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=given.ranks,
        strategy="lockstep_ddp",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir="outputs",
        callbacks=[finder],
    )
    module = Net()
    trainer.fit(module)
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps with {module.batch_size} samples a rank and micro-batch")


if __name__ == "__main__":
    main()
