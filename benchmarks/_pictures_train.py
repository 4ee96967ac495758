"""The user's script of the picture `batch-size`: a search on two ranks, for a net of about 0.3 MB a sample."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import AutoBatchSize


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        width = 20_000
        self.layers = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 1))
        self.batch_size = 2

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(20_000, 64)), self.batch_size, shuffle=True)


if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="lockstep_ddp",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AutoBatchSize(memory_limit="1GiB", global_batch_size=4096, plot=True)],
    )
    trainer.fit(Net())
