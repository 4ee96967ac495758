"""Real wandb, mlflow and tensorboard: checked without being made, and where the runs end up."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import ScriptOutcome, run_script
from tests.models.application.command_lines import faults_of, only, path_with

for _package in ("mlflow", "wandb", "tensorboard"):
    pytest.importorskip(_package, reason="pip install '.[tensorboard,wandb,mlflow]'")

MLFLOW = "{_target_:lightning.pytorch.loggers.MLFlowLogger,tracking_uri:'sqlite:///made.db'}"
SECRETS = {
    name: f"not-for-everybody-{number}"
    for number, name in enumerate(
        ("hf_token", "github_token", "wandb_token", "client_secret", "db_password", "my_api_key")
    )
}
QUICK = ("trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "trainer.max_epochs=1")


@pytest.mark.parametrize(
    "argument",
    [
        f"+logger.own={MLFLOW}",
        f"+callbacks.own={{_target_:lightning.pytorch.callbacks.LearningRateMonitor,logging_interval:{MLFLOW}}}",
    ],
)
def test_the_check_makes_no_logger(argument: str) -> None:
    """Lightning's own makes its store when it is made, wherever it stands in the configuration."""
    assert faults_of(argument) == []
    assert not Path("made.db").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["logger.wandb._target_=lightning_lockstep.components.WandLogger"], "Did you mean 'WandbLogger'"),
        (["+logger.mlflow.uri=x"], "MLFlowLogger has no setting 'uri'."),
    ],
)
def test_what_is_wrong_with_a_logger_is_found_by_its_signature(arguments: list[str], expected: str) -> None:
    assert expected in only(faults_of("logger=[wandb,mlflow]", *arguments))


def lockstep_train(*arguments: str, cwd: Path, **env: str) -> ScriptOutcome:
    command = [sys.executable, "-m", "lightning_lockstep.train", *arguments, *QUICK]
    # wandb and mlflow are a user's: no account, no server, and not the machine of a continuous integration
    home = {"NETRC": str(cwd / "none"), "CI": "", **env}
    outcome = run_script(command, env=home, cwd=cwd, timeout=240)
    assert outcome.returncode == 0, outcome.output
    assert not outcome.leftovers
    for noise in (" INFO ", "not found. Creating", "Warning"):
        assert noise not in outcome.output
    return outcome


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_two_ranks_make_one_run_of_each_logger_with_the_whole_configuration(tmp_path: Path) -> None:
    outcome = lockstep_train(
        "trainer.devices=2",
        "trainer.limit_train_batches=3",
        "logger=[csv,tensorboard,wandb,mlflow]",
        "hydra.run.dir=run",
        *(f"++{key}={secret}" for key, secret in SECRETS.items()),
        *("++token_level=word", "unmask=[token_level]"),
        cwd=tmp_path,
    )
    run = tmp_path / "run"
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "something was written elsewhere"
    (offline,) = run.glob("wandb/offline-run-*")
    (file,) = offline.glob("*.wandb")
    assert b"find_unused_parameters" in file.read_bytes()
    database = run / "mlflow" / "mlflow.db"
    assert rows(database, "select status from runs") == [("FINISHED",)]
    assert ("3",) in rows(database, "select value from params where key = 'config/trainer/limit_train_batches'")
    assert rows(database, "select count(*) from metrics where key = 'train_loss'") == [(3,)]
    for folder in ("csv", "tensorboard"):
        logged = yaml.safe_load((run / folder / "hparams.yaml").read_text())
        assert logged["config"]["trainer"]["limit_train_batches"] == 3
        assert logged["width"] == 32, "the model's own stay"
        assert [logged["config"][key] for key in SECRETS] == ["***"] * len(SECRETS)
        assert logged["config"]["token_level"] == "word"
    files = [path for path in run.rglob("*") if path.is_file() and path.suffix != ".ckpt"]
    secrets = [secret.encode() for secret in SECRETS.values()]
    assert [path for path in files if any(secret in path.read_bytes() for secret in secrets)] == []
    table = outcome.stdout.replace("\n", "")
    for place in (
        "run/csv/metrics.csv",
        "run/tensorboard",
    ):
        assert place in table


def test_a_failed_run_says_so_and_is_marked(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from lightning.pytorch import Callback\n"
        "class Fail(Callback):\n"
        "    def on_train_batch_start(self, *_):\n"
        "        raise RuntimeError('boom')\n"
    )
    outcome = run_script(
        [
            *(sys.executable, "-m", "lightning_lockstep.train", *QUICK, "hydra.run.dir=run"),
            *("logger=[wandb,mlflow]", "+callbacks.own._target_=own.Fail"),
        ],
        env={"NETRC": str(tmp_path / "none"), "PYTHONPATH": path_with(tmp_path)},
        cwd=tmp_path,
        timeout=240,
    )
    assert outcome.returncode == 1, outcome.output
    assert "RuntimeError: boom" in outcome.output
    assert rows(tmp_path / "run" / "mlflow" / "mlflow.db", "select status from runs") == [("FAILED",)]
