"""`lockstep-train` with a module from a file in the folder where it is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.common.application.command_lines import faults_of, only

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
OWN = ("model=own", "model._target_=mine.Net", "data=own", "data._target_=mine.Data")


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.fixture
def importable(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the start of the command, in this process."""
    monkeypatch.chdir(own_folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(own_folder)])
    monkeypatch.delitem(sys.modules, "mine", raising=False)


@pytest.mark.usefixtures("importable")
def test_the_keys_of_the_choices_that_it_replaces_are_one_fault_each() -> None:
    model, data = faults_of("model._target_=mine.Net", "data._target_=mine.Data")
    assert model.startswith("model._target_=mine.Net: Net has no setting width, num_classes,")
    assert (
        "which model=cnn brings. Add model=own, which brings none: model=own model._target_=mine.Net;"
        in model
    )
    assert "Add data=own" in data
    typed = faults_of("model._target_=mine.Net", "model.width=16", *OWN[2:])
    assert typed[1] == "model.width=16: Net has no setting 'width'."


@pytest.mark.usefixtures("importable")
def test_nothing_is_wrong_with_own_choices_and_a_setting_is_added_with_a_plus() -> None:
    assert faults_of(*OWN, "+model.hidden=3") == []
    assert only(faults_of("model.hidden=3", *OWN)).endswith("A new key is added with +model.hidden=3")
    assert faults_of("model=own", "model._target_=mine.Everything", "~data") == []
    required = faults_of("model=own", "data=own")
    assert required == [
        f"{name}._target_ is required: add {name}._target_=module.Class" for name in ("data", "model")
    ]


def test_a_module_that_is_not_there_is_said_with_where_it_was_looked_for(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_folder)
    fault = only(faults_of("model=own", "model._target_=mien.Net", "data=digits"))
    assert f"There is no module 'mien', neither in {os.getcwd()} nor installed. Did you mean 'mine'?" in fault
    assert "Expected module.Class." in only(faults_of("model=own", "model._target_=Net", "data=digits"))
