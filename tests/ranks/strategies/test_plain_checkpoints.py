"""Checkpoints are read as plain data: hyperparameters of any kind stop no run, and no file runs code."""

from __future__ import annotations

import enum
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import (
    ConfigurationError,
    LockstepDDPStrategy,
    LockstepDeepSpeedStrategy,
    LockstepFSDPStrategy,
)
from lightning_lockstep._lightning import (
    LightningDataModule,
    LightningModule,
    ModelCheckpoint,
    Trainer,
)
from lightning_lockstep.distributed.plain_data import Inert, load_without_objects, read_plain
from tests.harness import run_ranks


class Kind(enum.Enum):
    A = 1


class Color(str, enum.Enum):
    RED = "red"


@dataclass
class Sizes:
    width: int = 4
    layers: list[int] = field(default_factory=lambda: [1, 2])


class Planted:
    """Leaves a file when it is made from a pickle."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return plant, (self.marker,)


def plant(marker: str) -> int:
    Path(marker).touch()
    return 1


CONFIG = {"width": 4, "layers": [1, {"deep": None}], "root": "${oc.env:HOME}", "size": "${width}"}
# What is saved, and what it is read as.
PLAIN = {
    "a config": (OmegaConf.create(CONFIG), CONFIG),
    "a list of a config": (OmegaConf.create([0.9, 0.99]), [0.9, 0.99]),
    "a structured config": (OmegaConf.structured(Sizes), {"width": 4, "layers": [1, 2]}),
    "a config in a list": ([OmegaConf.create({"a": 1})], [{"a": 1}]),
    "a missing config": (OmegaConf.create({"a": "???", "b": None}), {"a": "???", "b": None}),
    "an array": (np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3)),
    "an array of texts": (np.array(["a", "bc"]), np.array(["a", "bc"])),
    "a number of numpy": (np.float32(0.5), np.float32(0.5)),
    "a path": (Path("runs") / "one", "runs/one"),
    "a defaultdict": (defaultdict(list, {"a": [1]}), {"a": [1]}),
}
OBJECTS = {
    "an enum": Kind.A,
    "a text enum": Color.RED,
    "a module": torch.nn.MSELoss(),
    "a class": Kind,
    "a function": len,
}


@pytest.mark.parametrize("case", PLAIN)
def test_plain_data_in_another_coat(case: str, tmp_path: Path) -> None:
    saved, expected = PLAIN[case]
    torch.save({"value": saved, "weights": torch.ones(2)}, tmp_path / "file.pt")
    found = read_plain(tmp_path / "file.pt")["value"]
    assert isinstance(found, type(expected))
    assert np.array_equal(found, expected) if isinstance(found, np.ndarray) else found == expected


@pytest.mark.parametrize("case", OBJECTS)
def test_objects_are_described_and_not_made(case: str, tmp_path: Path) -> None:
    torch.save({"value": OBJECTS[case], "bomb": Planted(str(tmp_path / "marker"))}, tmp_path / "file.pt")
    found = read_plain(tmp_path / "file.pt")
    assert isinstance(found["value"], Inert) or issubclass(found["value"], Inert)
    assert isinstance(found["bomb"], Inert) and not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"hyper_parameters": {"a": os.system}}, r"names posix\.system, which could run code"),
        ({"callbacks": {"counts": {Kind.A: 1}}}, r"holds objects of classes: callbacks\.counts \(.*Kind\)"),
    ],
)
def test_what_could_start_a_program_and_an_object_as_a_key_are_refused(
    content: dict[str, Any], said: str, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "file.pt")

    def load(path: Path, weights_only: bool | None) -> Any:
        return torch.load(path, weights_only=weights_only)

    with pytest.raises(ConfigurationError, match=said):
        load_without_objects(load, tmp_path / "file.pt", None)


# -- Runs --


class Net(LightningModule):
    def __init__(self, values: Any = None, config: Any = None, lr: Any = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch[0]).square().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        betas = OmegaConf.create([0.9, 0.99])
        return torch.optim.Adam(self.parameters(), np.float64(self.lr), betas=betas)  # type: ignore[arg-type]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["hyper_parameters"]


class WholeConfig(Net):
    """A config as the hyperparameters, not as one of them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)


class WithThing(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["thing"] = {"inside": Kind.A}


class Data(LightningDataModule):
    def __init__(self, values: Any) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(16, 4)), 4)

    val_dataloader = test_dataloader = train_dataloader


def values() -> dict[str, Any]:
    return {name: saved for name, (saved, _) in PLAIN.items()} | OBJECTS


def make_net() -> Net:
    return Net(values(), OmegaConf.create(CONFIG))


def trainer_of(strategy: Any, folder: str, epochs: int, *callbacks: Any) -> Trainer:
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, monitor="val", save_last=True), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


STRATEGIES = {
    "ddp": LockstepDDPStrategy,
    "fsdp, one file": LockstepFSDPStrategy,
    "fsdp, a folder": lambda: LockstepFSDPStrategy(state_dict="sharded"),
    "deepspeed": lambda: LockstepDeepSpeedStrategy(stage=2),
}


def runs(folder: str, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        path, make = f"{folder}/{name}", STRATEGIES[name]
        trainer_of(make(), path, 1).fit(make_net(), datamodule=Data(values()))
        net = make_net()
        trainer = trainer_of(make(), path, 2)
        trainer.fit(net, datamodule=Data(values()), ckpt_path=f"{path}/last.ckpt", weights_only=None)
        trainer.test(net, datamodule=Data(values()), ckpt_path="best", verbose=False)
        found[name] = trainer.global_step, net.seen
    return found


def more_runs(folder: str) -> dict[str, Any]:
    """What is the same for all strategies is tried under DDP; objects in both kinds of checkpoint."""
    found: dict[str, Any] = {}
    finder = LearningRateFinder(num_training_steps=3)
    trainer = trainer_of(LockstepDDPStrategy(), f"{folder}/finder", 1, finder)
    trainer.fit(make_net(), datamodule=Data(values()))
    found["finder"] = trainer.global_step
    whole = OmegaConf.create({"width": 4, "root": "${oc.env:HOME}"})
    trainer_of(LockstepDDPStrategy(), f"{folder}/whole", 1).fit(WholeConfig(whole), datamodule=Data(1))
    for name, trusted in (("whole", None), ("whole", True), ("whole", False)):
        trainer = trainer_of(LockstepDDPStrategy(), folder, 2)
        trainer.fit(
            WholeConfig(whole),
            datamodule=Data(1),
            ckpt_path=f"{folder}/{name}/last.ckpt",
            weights_only=trusted,
        )
        found[f"{name} {trusted}"] = trainer.global_step
    for name in ("ddp", "fsdp, a folder"):
        make, path = STRATEGIES[name], f"{folder}/thing of {name}"
        trainer_of(make(), path, 1).fit(WithThing(), datamodule=Data(1))
        for trusted in (None, True, False):
            try:
                trainer, last = trainer_of(make(), folder, 2), f"{path}/last.ckpt"
                trainer.fit(WithThing(), datamodule=Data(1), ckpt_path=last, weights_only=trusted)
                found[f"{name} {trusted}"] = trainer.global_step
            except ConfigurationError as error:  # noqa: PERF203
                found[f"{name} {trusted}"] = str(error)
    return found


def check(found: dict[str, Any]) -> None:
    for name, (steps, seen) in found.items():
        assert steps == 4, name
        if name != "deepspeed":  # which itself unpickles what as many ranks have written
            assert seen == {"lr": 0.1, "config": CONFIG}, name


def test_runs_go_on_whatever_their_hyperparameters_are(tmp_path: Path) -> None:
    for found in run_ranks(2, runs, str(tmp_path), [*STRATEGIES], timeout=200):
        check(found)


def test_other_objects_are_named_and_refused(tmp_path: Path) -> None:
    for found in run_ranks(2, more_runs, str(tmp_path), timeout=200):
        assert found["finder"] == 2
        assert [found[f"whole {trusted}"] for trusted in (None, True, False)] == [4, 4, 4]
        where = "objects of classes: thing.inside (tests.ranks.strategies.test_plain_checkpoints.Kind)"
        for name in ("ddp", "fsdp, a folder"):
            for trusted in (None, True):
                said = found[f"{name} {trusted}"]
                assert where in said and "give weights_only=False" in said
            assert found[f"{name} False"] == 4
