"""From the report to the command line: the remedy, pasted as it is printed, lets the failing run pass."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.harness import ScriptOutcome, run_script

#: A net whose scores leave the range of float16 in the fourth batch.
OWN = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn


class Scores(nn.Module):
    def forward(self, x):
        return x * 1000 / 1000


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.scores, self.last = nn.Linear(8, 8), Scores(), nn.Linear(8, 1)
        nn.init.eye_(self.first.weight)

    def training_step(self, batch, batch_idx):
        return self.last(self.scores(self.first(batch))).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Data(LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()

    def train_dataloader(self):
        rows = torch.randn(24, 8)
        rows[14, 3] = 100.0
        return torch.utils.data.DataLoader(rows, batch_size=4)
"""
TRAIN = (
    "--config-dir conf model=net data=net precision=16-mixed debug=overflow strategy=ddp"
    " trainer.devices=1 trainer.accelerator=cpu trainer.max_epochs=1 trainer.use_distributed_sampler=false"
    " checkpoint=none validate=false test=false"
)
REMEDY = "'callbacks.fp32_modules.modules=[scores]'"


def train(folder: Path, *more: str) -> ScriptOutcome:
    command = [sys.executable, "-m", "lightning_lockstep.train", *TRAIN.split(), *more]
    return run_script(command, timeout=180, env={"PYTHONPATH": str(folder)}, cwd=folder)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    for group, text in (("model", "_target_: own.Net\n"), ("data", "_target_: own.Data\nbatch_size: 4\n")):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "net.yaml").write_text(text)
    return tmp_path


def test_the_report_of_a_run_says_what_to_write_and_has_a_picture(project: Path) -> None:
    failed = train(project)
    assert failed.returncode not in (0, None), failed.output
    assert failed.stderr.count("Detected inf/nan during batch_number=3 (epoch 0, batch 3, step 3)") >= 1
    assert failed.stderr.count("--- rank 0 on host") == 1, "the report is printed once"
    assert set(re.findall(r"on the command line:\s+(\S+)", failed.stderr)) == {REMEDY}, failed.output
    [run] = (project / "outputs" / "train").iterdir()
    assert (run / "overflow" / "batch-3.png").stat().st_size > 10_000


def test_what_it_says_lets_the_run_pass(project: Path) -> None:
    passed = train(project, *shlex.split(REMEDY))
    assert passed.returncode == 0, passed.output
    assert "Detected inf/nan" not in passed.output
