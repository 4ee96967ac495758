"""Every config file composes, and fits what it names."""

from __future__ import annotations

from pathlib import Path

import hydra.utils
import pytest
from omegaconf import OmegaConf

import lightning_lockstep
from lightning_lockstep._lightning import Trainer
from tests.models.application.command_lines import faults_of

CONF = Path(lightning_lockstep.__file__).parent / "conf"
FILES = sorted(path for path in CONF.rglob("*.yaml"))
CHOICES = [path for path in FILES if path.parent != CONF and not path.name.startswith("_")]

# What a choice needs beside it to be judged on this machine.
WITH = {
    "callbacks/effective_batch_size": ["callbacks.effective_batch_size.global_batch_size=256"],
    "data/own": ["data._target_=lightning_lockstep.demo.DigitsData"],
    "data/source_text": ["model=byte_gpt"],
    "model/byte_gpt": ["data=source_text"],
    "model/own": ["model._target_=lightning_lockstep.demo.ConvNet"],
    "trainer/gpu": ["trainer.accelerator=cpu"],
}


def choice_of(path: Path) -> str:
    return path.relative_to(CONF).with_suffix("").as_posix()


def command_lines() -> list[list[str]]:
    """Command lines with all choices among them: in each the next of every group, in the first all of a list."""
    groups: dict[str, list[str]] = {}
    for path in CHOICES:
        group, _, name = choice_of(path).rpartition("/")
        groups.setdefault(group, []).append(name)
    lists = {"callbacks", "logger"}
    first = [f"{group}=[{','.join(n for n in groups[group] if n != 'none')}]" for group in sorted(lists)]
    first += WITH["callbacks/effective_batch_size"]
    lines = [first, *([f"{group}=none"] for group in sorted(lists))]
    # These change what others have chosen, or need it, so each has a command line of its own.
    alone = ("data", "debug", "experiment", "model")
    lines += [[f"{group}={n}", *WITH.get(f"{group}/{n}", [])] for group in alone for n in groups[group]]
    others = {group: names for group, names in groups.items() if group not in lists.union(alone)}
    for number in range(max(map(len, others.values()))):
        chosen = {group: names[number] for group, names in others.items() if number < len(names)}
        line = [f"{group}={name}" for group, name in chosen.items()]
        more = [given for group, name in chosen.items() for given in WITH.get(f"{group}/{name}", [])]
        lines.append(line + more)
    return lines


@pytest.mark.parametrize("line", command_lines(), ids=" ".join)
def test_choices_compose_and_their_values_fit_their_targets(line: list[str]) -> None:
    # Whether its package is installed is the machine's matter.
    assert [fault for fault in faults_of(*line) if "needs the package" not in fault] == []


@pytest.mark.parametrize("path", sorted((CONF / "checkpoint").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_trainer_takes_the_callbacks_of_each_choice_of_checkpoints(path: Path, tmp_path: Path) -> None:
    """Lightning refuses two whose state it could not tell apart."""
    config = OmegaConf.create({"objective": {"metric": "val_loss", "mode": "min"}, "checkpoint": OmegaConf.load(path)})
    for callback in config.checkpoint.values():
        callback.dirpath = str(tmp_path)
    callbacks = [hydra.utils.instantiate(callback) for callback in config.checkpoint.values()]
    trainer = Trainer(callbacks=[*callbacks], logger=False, accelerator="cpu")
    assert set(callbacks) <= set(trainer.checkpoint_callbacks)
