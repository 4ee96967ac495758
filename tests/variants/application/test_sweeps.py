"""Sweeps by Hydra's other launchers and sweepers: every job has ranks of its own, in whatever process it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.harness import MODELS, ScriptOutcome, run_script
from tests.models.application.command_lines import faults_of, look_at, only

pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="pip install '.[sweeps]'")
ECHO = MODELS / "application" / "apps" / "echo.py"
QUICK = ("trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "trainer.devices=2", "test=false")
TEXT = ("data=source_text", "model=byte_gpt", "data.max_bytes=100000")


MODULE = ("-m", "lightning_lockstep.train")
# What the script does that pip makes for a console command.
CONSOLE = "from lightning_lockstep.train import main\nif __name__ == '__main__':\n    main()\n"


def sweep(*arguments: str, cwd: Path, program: tuple[str, ...] = MODULE, **env: str) -> ScriptOutcome:
    command = [sys.executable, *program, "-m", "hydra.sweep.dir=sweep", *QUICK, *arguments]
    return run_script(command, cwd=cwd, timeout=240, env=env)


def summaries(cwd: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(cwd.glob("sweep/*/summary.json"))]


FAILS_ONCE_ON_RANKS = """
import os
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.train import hydra_main

class Net(BoringModel):
    def training_step(self, batch, index):
        if self.a == 2 and index == 1 and self.global_rank == 1:
            raise ValueError("two is too many")
        return super().training_step(batch, index)

@hydra_main(config_path=None, config_name=None, version_base=None)
def main(config):
    net = Net()
    net.a = config.a
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = LockstepDDPStrategy(grace_period=5)
    L.Trainer(accelerator="cpu", devices=2, strategy=strategy, limit_train_batches=3, max_epochs=1, **options).fit(net)
    return config.a
main()
"""


def test_a_sweep_goes_on_after_a_job_of_which_one_rank_failed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FAILS_ONCE_ON_RANKS)
    outcome = run_script(["program.py", "-m", "hydra.sweep.dir=sweep", "+a=1,2,3"], cwd=tmp_path, timeout=120)
    assert "lightning-lockstep: job 1 failed: RankFailedError: rank 1 of 2" in outcome.stderr, outcome.output
    table = [line.split()[1:4] for line in outcome.stderr.splitlines() if "+a=" in line and line.split()[1] != "HYDRA"]
    assert table[-3:] == [["+a=1", "1", "0"], ["+a=2", "-", "RankFailedError:"], ["+a=3", "3", "0"]], outcome.output
    assert outcome.returncode == 1 and outcome.leftovers == ()


# A script with Hydra's own decorator, by joblib: test_examples.py.
def test_a_job_in_a_process_of_its_own_starts_ranks(tmp_path: Path) -> None:
    env = {"ECHO_TO": str(tmp_path), "ECHO_FIT": "1", "ECHO_SECRET": "none"}
    jobs = ["-m", "hydra/launcher=submitit_local", "text=first", "hydra.sweep.dir=sweep"]
    outcome = run_script([str(ECHO), *jobs], env=env, cwd=tmp_path, timeout=240)
    assert outcome.returncode == 0, outcome.output
    assert not outcome.leftovers
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    assert [(values["text"], values["numbers"]) for values in found] == [("first", [1, 2.5, "3"])] * 2
    [log] = tmp_path.glob("sweep/0/*.log")
    assert "rank 0 was here" in log.read_text() and "rank 1" not in log.read_text()


def test_optuna_goes_by_the_objective_of_ranks_in_workers(tmp_path: Path) -> None:
    choice = (
        "hydra/sweeper=optuna",
        "hydra/launcher=joblib",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=2",
    )
    rates = "model.learning_rate=interval(0.001,0.1)"
    (command := tmp_path / "lockstep-train").write_text(CONSOLE)
    outcome = sweep(*choice, *TEXT, rates, "trainer.max_steps=2", cwd=tmp_path, program=(str(command),))
    assert outcome.returncode == 0, outcome.output
    assert not outcome.leftovers
    jobs = summaries(tmp_path)
    assert [job["ranks"] for job in jobs] == [2, 2]
    best = OmegaConf.load(tmp_path / "sweep" / "optimization_results.yaml")
    assert best.best_value == pytest.approx(min(job["metrics"]["val_loss"] for job in jobs))
    assert f"Best value: {best.best_value}" in outcome.output


def test_the_error_of_a_rank_in_a_worker_is_shown_last_with_its_rank(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        """
from lightning_lockstep.demo import ByteGPT

class Net(ByteGPT):
    def __init__(self, *, bad, **settings):
        super().__init__(**settings)
        self.bad = bad

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == self.bad:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)
"""
    )
    one = ("hydra/launcher=joblib", "model._target_=own.Net", "trainer.max_steps=2")
    outcome = sweep(*one, *TEXT, "+model.bad=1", cwd=tmp_path)
    assert outcome.returncode == 1, outcome.output
    assert not outcome.leftovers
    lines = outcome.stderr.strip().splitlines()
    assert lines[-2].startswith("rank 1 of 2 (host "), outcome.output
    assert lines[-2].endswith("in training_step: ValueError: boom") and lines[-1].startswith("Saved to ")
    assert "hydra/_internal" not in outcome.stderr and "pickle" not in outcome.stderr
    assert summaries(tmp_path) == []


def test_ranks_that_run_every_job_together_are_no_place_for_a_launcher() -> None:
    arguments = ("-m", "hydra/launcher=joblib", "seed=1,2")
    assert look_at(*arguments)[0] == []
    [fault] = look_at(*arguments, alone=False)[0]
    assert fault.startswith("hydra/launcher=joblib: expected basic under torchrun, srun or mpirun")


def test_a_launcher_that_is_not_installed_names_its_extra() -> None:
    fault = only(faults_of("hydra/launcher=joblibb"))
    assert "Did you mean 'joblib'?" in fault
    assert "pip install '.[sweeps]'" in fault
