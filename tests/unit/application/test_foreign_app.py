"""An app that makes its own Trainer takes our choices: under both names, at the place that it says."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf

import lightning_lockstep
from lightning_lockstep import OverflowDetector
from tests.models.application.command_lines import faults_of

APP = Path(__file__).parents[3] / "examples" / "foreign_app"
CONF = Path(lightning_lockstep.__file__).parent / "conf"
NAMED = [
    path.relative_to(CONF).with_suffix("").as_posix()
    for group in ("callbacks", "checkpoint", "data", "logger", "model", "strategy")
    for path in sorted((CONF / group).glob("[!_]*.yaml"))
]


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(APP / "conf"), version_base="1.3"):
        return compose("config", list(overrides))


def test_choices_have_a_second_name_that_no_app_hides() -> None:
    def all_of(prefix: str) -> list[str]:
        """Each choice at a place of its own."""
        split = [name.partition("/") for name in NAMED]
        return [f"+{prefix}{group}@place_{i}={choice}" for i, (group, _, choice) in enumerate(split)]

    with initialize_config_module("lightning_lockstep.conf", version_base="1.3"):
        ours = compose(overrides=all_of(""))
    found = composed(*all_of("lockstep/"))
    for i, name in enumerate(NAMED):
        first, second = (OmegaConf.to_container(one.get(f"place_{i}", OmegaConf.create())) for one in (ours, found))
        assert first == second, name


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
    assert faults_of("callbacks=[as_list,overflow]", "logger=[as_list,csv]") == []
