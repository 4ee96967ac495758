"""Find the largest batch under a memory limit, keep the global batch, and survive a batch that does not fit.

    python examples/find_batch_size.py                 # one process, 1 GiB
    python examples/find_batch_size.py --ranks 2 --memory-limit 900MiB --global-batch-size 4096
    python examples/find_batch_size.py --tuner         # the search apart from the run, as with Lightning's Tuner

The run folder (--folder) gets batch_size.json and, with matplotlib installed, batch_size.png.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import AutoBatchSize, LockstepTuner


class Net(LightningModule):
    """A layer with many activations: memory grows by about 0.3 MB a sample."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 20_000), nn.GELU(), nn.LayerNorm(20_000), nn.Linear(20_000, 1)
        )
        self.batch_size = 2  # AutoBatchSize sets it
        self.samples = samples

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Mean squared error against the sum of the inputs."""
        (inputs,) = batch
        loss = nn.functional.mse_loss(self.layers(inputs), inputs.sum(1, keepdim=True))
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam: two further numbers a parameter, from its first step on."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The loader is made with the attribute."""
        return DataLoader(
            TensorDataset(torch.randn(self.samples, 64)), batch_size=self.batch_size, shuffle=True
        )


def main() -> None:
    """Search, then train a few steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes on this host")
    parser.add_argument("--memory-limit", default="1GiB", help="most memory of a rank")
    parser.add_argument("--mode", default="model", help="model, binsearch or power")
    parser.add_argument("--global-batch-size", type=int, help="samples of all ranks in one optimizer step")
    parser.add_argument("--tuner", action="store_true", help="search apart from the run, with LockstepTuner")
    parser.add_argument("--folder", default="outputs/find_batch_size", help="run folder")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(1)
    finder = AutoBatchSize(
        options.mode,
        memory_limit=options.memory_limit,
        global_batch_size=options.global_batch_size,
        on_oom="split",
        plot=importlib.util.find_spec("matplotlib") is not None,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy="lockstep_ddp" if options.ranks > 1 else "auto",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=options.folder,
        callbacks=[] if options.tuner else [finder],
    )
    module = Net(samples=20_000)
    if options.tuner:
        tuner = LockstepTuner(trainer)
        size = tuner.scale_batch_size(module, mode=options.mode, memory_limit=options.memory_limit)
        print(f"rank {trainer.global_rank}: {size} samples a rank fit")
    trainer.fit(module)
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps with {module.batch_size} samples a rank and micro-batch")


if __name__ == "__main__":
    main()
