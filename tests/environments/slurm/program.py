"""A rank of the tests on a real Slurm; what it does is the first argument."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lockstep import LockstepDDPStrategy, LockstepDeepSpeedStrategy, LockstepMPIStrategy

DO, NODES = sys.argv[1], int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
STEPS = 40


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if DO == "requeue":
            time.sleep(0.1)
            if self.global_rank == 0:
                print("step", self.global_step, flush=True)
        if DO == "raise" and batch_idx == 3 and self.global_rank == 1:
            raise ValueError("boom")
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(64, 4), batch_size=2)


def strategy() -> Any:
    if DO == "deepspeed":
        return LockstepDeepSpeedStrategy(stage=3, grace_period=5.0)
    made = LockstepMPIStrategy if DO == "mpi" else LockstepDDPStrategy
    return made(grace_period=5.0)


def main() -> None:
    trainer = L.Trainer(
        strategy=strategy(),
        accelerator="cpu",
        devices=int(os.environ.get("DEVICES", "2")),
        num_nodes=int(os.environ.get("NODES", NODES)),
        max_steps=STEPS if DO == "requeue" else 6,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=DO == "requeue",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.environ.get("RUN_FOLDER", "."),
    )
    trainer.fit(Model())
    environment = type(trainer.strategy.cluster_environment).__name__
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {environment} {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
