"""Looks at command lines of `lockstep-train` without running them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from omegaconf import DictConfig

from lightning_lockstep._application.checks import check_training
from lightning_lockstep._application.configs import search_path_of
from lightning_lockstep._application.overrides import check_command_line, read_arguments
from lightning_lockstep.train import main


def look_at(*arguments: str, alone: bool = True) -> tuple[list[str], DictConfig | None]:
    """What `lockstep-train` finds out about these arguments before it starts anything."""
    parsed = read_arguments(list(arguments))
    search_path = search_path_of(main, "pkg://lightning_lockstep.conf", parsed)
    return check_command_line(parsed, search_path, "lockstep_train", check_training, alone=alone)[:2]


def faults_of(*arguments: str) -> list[str]:
    """What `lockstep-train` finds wrong with these arguments before it starts anything."""
    return look_at(*arguments)[0]


def only(faults: list[str]) -> str:
    """The one fault there is."""
    assert len(faults) == 1, faults
    return faults[0]


#: `lockstep-train` as a module, and on two ranks of torchrun.
TRAIN = [sys.executable, "-m", "lightning_lockstep.train"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *TRAIN[1:],
]


def path_with(folder: Path) -> str:
    """Return `PYTHONPATH` with a folder of modules in front."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


#: A module of a user's own, `mine.py`.
MINE = """
import lightning as L
import torch


class Net(L.LightningModule):
    def __init__(self, hidden: int = 4):
        super().__init__()
        self.layer = torch.nn.Linear(8, hidden)

    def training_step(self, batch, index):
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch, index):
        self.log("val_loss", self.layer(batch[0]).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(L.LightningDataModule):
    def __init__(self, size: int = 16):
        super().__init__()
        self.size = size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(self.size, 8)), 4)

    val_dataloader = train_dataloader


class Everything(Net):
    size = 16
    train_dataloader = Data.train_dataloader
"""
