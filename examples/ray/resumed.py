"""Ray Train starts all workers again after a failure, and the run goes on with the next batch.

    pip install 'ray[train]'
    python examples/ray/resumed.py

Rank 1 raises in optimizer step 13, in the midst of epoch 1, in the first attempt. The second attempt resumes the newest
checkpoint, of step 12, by `ckpt_path="last"`, which is nothing where there is none yet (docs/ray.md).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_lockstep

WORKERS, EPOCHS, BATCHES = 2, 2, 10  # batches of a rank in an epoch


class Net(LightningModule):
    """A line through 16 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum, so that there is a state to resume."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class FailsOnce(Callback):
    """Raises on rank 1 after 13 steps, unless an earlier attempt has done so."""

    def __init__(self, folder: Path) -> None:
        self.mark, self.seen = folder / "has failed", list[tuple[int, int]]()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note epoch and batch."""
        if trainer.global_step == 13 and trainer.global_rank == 1 and not self.mark.exists():
            self.mark.touch()
            raise RuntimeError("the first attempt fails here")
        self.seen.append((trainer.current_epoch, batch_idx))


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Fit on one worker; every worker of every attempt runs this function."""
    seed_everything(1)
    folder = Path(config["folder"])
    inputs = torch.randn(WORKERS * BATCHES * 32, 16)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=32, shuffle=True)
    counted = FailsOnce(folder)
    # All nodes must see this folder; where they do not, see docs/ray.md.
    saved = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=4, save_last=True, save_top_k=0)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORKERS,  # workers on each node
        num_nodes=1,
        strategy=getattr(lightning_lockstep, config["strategy"])(),
        max_epochs=EPOCHS,
        callbacks=[counted, saved],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), loader, ckpt_path="last")
    return {"steps": trainer.global_step, "first": counted.seen[0]}


def main() -> None:
    """Train on two workers of this machine, which may fail once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="LockstepDDPStrategy")
    given = parser.parse_args()
    ray.init(num_cpus=WORKERS)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": folder, "strategy": given.strategy},
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        )
        found = trainer.fit().return_value  # of rank 0
    epoch, batch = found["first"]
    print(f"done: {found['steps']} steps; the second attempt began at epoch {epoch}, batch {batch}")


if __name__ == "__main__":
    main()
