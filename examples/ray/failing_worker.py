"""Two workers of Ray Train under LockstepDDPStrategy; one of them raises, and the driver's error names it.

    pip install 'ray[train]'
    python examples/ray/failing_worker.py                # rank 1 raises in batch 5: exit code 1
    python examples/ray/failing_worker.py --fail never   # both come to the end: exit code 0
    python examples/ray/failing_worker.py --fail killed  # rank 1 is killed by SIGKILL

Nothing of Ray is given to the Trainer: the strategy finds the ranks that Ray has started (docs/ray.md).
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import ray
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_lockstep

WORKERS = 2


class Net(LightningModule):
    """A line through 16 numbers; on rank 1 it may go wrong in batch 5."""

    def __init__(self, fail: str) -> None:
        super().__init__()
        self.fail = fail
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        inputs, targets = batch
        if batch_idx == 5 and self.global_rank == 1:
            if self.fail == "raises":
                raise ValueError("this batch cannot be used")
            if self.fail == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Fit on one worker; every worker runs this function, in a thread of its process."""
    seed_everything(1)
    inputs = torch.randn(640, 16)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=32)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORKERS,  # workers on each node
        num_nodes=1,
        strategy=getattr(lightning_lockstep, config["strategy"])(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(config["fail"]), loader)
    return {"steps": trainer.global_step, "ranks": trainer.world_size}


def main() -> None:
    """Train on two workers of this machine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", choices=["raises", "killed", "never"], default="raises")
    parser.add_argument("--strategy", default="LockstepDDPStrategy")
    given = parser.parse_args()
    ray.init(num_cpus=WORKERS)
    trainer = TorchTrainer(
        train,
        train_loop_config={"fail": given.fail, "strategy": given.strategy},
        scaling_config=ScalingConfig(num_workers=WORKERS),
    )
    found = trainer.fit().return_value  # of rank 0
    print(f"done: {found['steps']} steps on {found['ranks']} ranks")


if __name__ == "__main__":
    main()
