"""An app that has only our configs: what its README shows is what its command lines print."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf

import lightning_lockstep
from lightning_lockstep import OverflowDetector
from tests.helpers import run_script

APP = Path(__file__).parents[3] / "examples" / "foreign_app"
CONF = Path(lightning_lockstep.__file__).parent / "conf"
SHOWN = re.findall(r"^python (.*)\n# (.*)$", (APP / "README.md").read_text(), re.MULTILINE)
NAMED = [
    path.relative_to(CONF).with_suffix("").as_posix()
    for group in ("callbacks", "checkpoint", "data", "logger", "model", "strategy")
    for path in sorted((CONF / group).glob("[!_]*.yaml"))
]


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(APP / "conf"), version_base="1.3"):
        return compose("config", list(overrides))


def test_the_readme_shows_command_lines() -> None:
    assert len(SHOWN) >= 5


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_line(command: str, printed: str, tmp_path: Path) -> None:
    if "joblib" in command:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    app = tmp_path / "app"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__", "outputs", "multirun"))
    outcome = run_script([sys.executable, *shlex.split(command)], cwd=app, timeout=180)
    assert outcome.returncode == 0, outcome.output
    assert not outcome.leftovers
    assert outcome.stdout.splitlines()[-1] == printed


@pytest.mark.parametrize("name", NAMED)
def test_a_choice_has_a_second_name_that_no_app_hides(name: str) -> None:
    group, _, choice = name.partition("/")
    with initialize_config_module("lightning_lockstep.conf", version_base="1.3"):
        ours = compose(overrides=[f"+{group}@somewhere={choice}"])
    found = composed(f"+lockstep/{group}@somewhere={choice}")
    first, second = (
        OmegaConf.to_container(one.get("somewhere", OmegaConf.create())) for one in (ours, found)
    )
    assert first == second


def test_what_choices_share_goes_to_the_place_of_the_choice() -> None:
    strategy = composed("+lockstep/strategy@trainer.strategy=deepspeed_stage_1").trainer.strategy
    assert strategy._target_ == "lightning_lockstep.LockstepDeepSpeedStrategy"
    assert strategy.stage == 1
    assert strategy.grace_period == 10


def test_without_a_place_the_second_name_composes_where_the_first_does() -> None:
    callbacks = composed("+lockstep/callbacks=early_stopping").callbacks
    assert callbacks.early_stopping._target_ == "lightning_lockstep.SyncedEarlyStopping"


def test_a_trainer_that_is_made_of_its_configuration_alone(tmp_path: Path) -> None:
    config = composed(
        "+callbacks@trainer.callbacks=[as_list,overflow]",
        "+checkpoint@trainer.callbacks=best",
        "+logger@trainer.logger=[as_list,csv]",
        "+strategy@trainer.strategy=single",
        "+precision=bf16-mixed",
        f"trainer.callbacks.best.dirpath={tmp_path}",
        f"trainer.callbacks.last.dirpath={tmp_path}",
        f"trainer.logger.csv.save_dir={tmp_path}",
        "trainer.enable_checkpointing=true",
        "+objective={metric: train_loss, mode: min}",
    )
    trainer = instantiate(config.trainer)
    assert isinstance(trainer, Trainer)
    assert {OverflowDetector, ModelCheckpoint} <= {type(callback) for callback in trainer.callbacks}
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger]
    assert (trainer.num_devices, trainer.precision) == (1, "bf16-mixed")


def test_in_lockstep_train_a_list_is_a_list_already() -> None:
    from tests.common.application.command_lines import faults_of

    assert faults_of("callbacks=[as_list,overflow]", "logger=[as_list,csv]") == []
