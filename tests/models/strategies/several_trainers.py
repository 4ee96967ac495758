"""A program of several Trainers, each an argument ENTRY_POINT:STRATEGY:DEVICES[xNODES]; what comes of it goes to files.

After the name of a strategy "!" stands for a new module.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

import lightning_lockstep  # noqa: F401
from lightning_lockstep.errors import LaunchError

SAMPLES = 24


class Net(L.LightningModule):
    """Counts in each stage which samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), SumMetric()

    def step(self, batch: Any) -> Any:
        self.seen.update(torch.ones(len(batch[0])))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return self.layer(batch[0]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0][:, 0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-4)


def run(entry: str, strategy: str, devices: int, nodes: int, net: Net) -> Any:
    samples = DataLoader(TensorDataset(torch.arange(float(SAMPLES))[:, None]), batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        max_epochs=1,
        default_root_dir="runs",
        enable_model_summary=False,
    )
    result = getattr(trainer, entry)(net, samples)
    seen = sum(map(len, result)) if entry == "predict" else int(trainer.callback_metrics["seen"])
    return seen, trainer.world_size, trainer.is_global_zero


def rank_here() -> str:
    names = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0")


def main() -> None:
    catches = sys.argv[1] == "catch"
    net = Net()
    for case in sys.argv[2:]:
        entry, strategy, size = case.split(":")
        devices, _, nodes = size.partition("x")
        if strategy.endswith("!"):  # a module that no Trainer has had
            strategy, net = strategy[:-1], Net()
        try:
            said: Any = run(entry, strategy, int(devices), int(nodes or 1), net)
        except LaunchError as error:
            if not catches:
                raise
            said = f"LaunchError: {error}"
        with Path(f"rank{rank_here()}").open("a") as file:
            file.write(f"{case} {said}\n")


if __name__ == "__main__":
    main()
