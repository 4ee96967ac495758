"""`lockstep-train` from the command line, on real ranks and real data."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_lockstep.doctor.checks.run import check
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import CheckOptions
from tests.harness import ScriptOutcome, run_script, start_script
from tests.harness.patience import wait_until
from tests.models.application.command_lines import MINE, TRAIN, path_with

QUICK = ("trainer.enable_progress_bar=false", "trainer.accelerator=cpu")
SAME = (*QUICK, "data.global_batch_size=64", "trainer.max_epochs=2")


class Run(NamedTuple):
    outcome: ScriptOutcome
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return loaded


def trained(command: list[str], *arguments: str, cwd: Path, folder: Path) -> Run:
    outcome = run_script([*command, *arguments], cwd=cwd, timeout=180)
    assert outcome.returncode == 0, outcome.output
    assert not outcome.leftovers
    return Run(outcome, folder)


def column(file: Path, name: str) -> list[float]:
    with open(file, newline="") as rows:
        return [float(row[name]) for row in csv.DictReader(rows) if row[name]]


# Each of these fixtures is one launch, and one test asks for it first.
@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def of_two(place: Path) -> Run:
    """Two ranks that the strategy starts."""
    arguments = (*SAME, "trainer.devices=2", "hydra.run.dir=runs/two")
    return trained(TRAIN, *arguments, cwd=place, folder=place / "runs" / "two")


@pytest.fixture(scope="module")
def of_one(place: Path) -> Run:
    arguments = (*SAME, "trainer.devices=1", "test=false", "hydra.run.dir=runs/one")
    return trained(TRAIN, *arguments, cwd=place, folder=place / "runs" / "one")


def test_two_ranks_learn_the_digits_and_make_one_folder(of_two: Run, place: Path) -> None:
    assert len(column(of_two.folder / "csv" / "metrics.csv", "train_loss")) == 42
    result = of_two.summary
    assert (result["steps"], result["epochs"], result["ranks"]) == (42, 2, 2)
    assert result["metrics"]["val_acc"] >= 0.9 and "test_loss" in result["metrics"]
    assert result["samples_per_second"] > 0
    assert Path(result["files"]["last checkpoint"]).is_file()
    assert of_two.outcome.stdout.count("run finished") == 1
    assert "checkpoint at" not in of_two.outcome.output, "the table says it"
    assert [path.name for path in place.iterdir()] == ["runs"], "one folder for all ranks"


def test_one_rank_learns_the_same(of_one: Run, of_two: Run) -> None:
    losses = (column(run.folder / "csv" / "metrics.csv", "train_loss") for run in (of_one, of_two))
    # The sums of one and of two ranks differ by a rounding, which every step makes larger; in float64 they stay
    # together (tests/ranks/same_numbers).
    assert max(abs(a - b) for a, b in list(zip(*losses, strict=True))[:11]) < 1e-5


def test_ctrl_c_says_how_far_the_run_came_and_how_it_goes_on(tmp_path: Path) -> None:
    arguments = [*QUICK, "trainer.devices=2", "trainer.max_epochs=1000", "seed=7"]
    with start_script([*TRAIN, *arguments, "hydra.run.dir=out"], cwd=tmp_path) as script:
        assert wait_until((tmp_path / "out" / "checkpoints" / "last.ckpt").exists, 120), script.stderr
        script.interrupt()
        outcome = script.finish(60)
    assert outcome.returncode == 130, outcome.output
    assert "Traceback" not in outcome.output
    said = re.search(r"interrupted after optimizer step (\d+); to go on: lockstep-doctor run (\S+)", outcome.stderr)
    assert said is not None, outcome.stderr
    found = list(check(Machine(), CheckOptions(folders=(said[2],))))
    assert "interrupted by Ctrl-C" in found[0].evidence and f"step {said[1]}" in found[0].evidence, found
    assert not any("still runs" in finding.evidence for finding in found)
    assert found[-1].fix[0].startswith(f"lockstep-train {' '.join(arguments)} ckpt_path=")


def test_a_wrong_command_line_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    """What a user's own constructor objects to included."""
    (tmp_path / "own.py").write_text(
        "from lightning_lockstep.demo.images import ConvNet\n"
        "class Own(ConvNet):\n"
        "    def __init__(self, width: int):\n"
        "        raise ValueError('width is out of fashion')\n"
    )
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "fashion.yaml").write_text("_target_: own.Own\nwidth: 8\n")
    run = tmp_path / "run"
    run.mkdir()
    env = {"PYTHONPATH": path_with(tmp_path)}
    wrong = ("strategy=dpp", "trainer.max_epochz=3", "data.batch_size=-1")
    for arguments, message in (
        (wrong, "lockstep-train: 3 errors in the configuration; nothing was started."),
        (("--config-dir", "../conf", "model=fashion"), "1. model.width=8: width is out of fashion"),
    ):
        outcome = run_script([*TRAIN, *arguments], cwd=run, env=env, timeout=180)
        assert outcome.returncode == 2
        assert message in outcome.stderr
        assert "Traceback" not in outcome.output
        if arguments is wrong:
            assert list(run.iterdir()) == []


def test_a_console_command_finds_own_classes_on_every_rank_and_leaves_out_the_test(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "random.py").write_text("raise ImportError('a file of the user, not the library')\n")
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "theirs.py").write_text("raise SystemExit('run as a plugin of Hydra')\n")
    # What a console command does: the folder of the command is in the path, the current one is not.
    command = tmp_path / "bin" / "lockstep-train"
    command.parent.mkdir()
    command.write_text("from lightning_lockstep.train import main\nif __name__ == '__main__':\n    main()\n")
    own = ("model=own", "model._target_=mine.Net", "+model.hidden=6", "data=own", "data._target_=mine.Data")
    more = ("trainer.max_epochs=1", "trainer.devices=2", "hydra.job.chdir=true")
    outcome = run_script([sys.executable, str(command), *own, *QUICK, *more], cwd=tmp_path, timeout=180)
    assert outcome.returncode == 0, outcome.output
    left_out = "lightning-lockstep: test=true is left out: Net has no test_step."
    assert outcome.stderr.count(left_out) == 1, outcome.stderr
    assert outcome.stdout.count("run finished") == 1, outcome.output
    # As seen from the shell, which is not in the folder of the run.
    assert "run folder: outputs/" in outcome.stdout, outcome.stdout


# With "continue" the process that was started is no rank, so that rank 0 is one that it has started.
@pytest.mark.parametrize("on_lost_rank", ["end", "continue"])
def test_two_ranks_end_with_one_message_and_exit_code_2_if_running_ranks_refuse_a_setting(
    on_lost_rank: str, tmp_path: Path
) -> None:
    more = ("strategy=ddp", f"strategy.on_lost_rank={on_lost_rank}")
    arguments = (*QUICK, "trainer.devices=2", "data.global_batch_size=5000", *more)
    outcome = run_script([*TRAIN, *arguments], cwd=tmp_path, timeout=180)
    assert outcome.returncode == 2, outcome.output
    assert outcome.stderr.count("one global batch of 5000 samples") == 1
    assert "one error in the configuration; the run has ended." in outcome.stderr
    assert outcome.stderr.rstrip().splitlines()[-1].startswith("HYDRA_FULL_ERROR=1 shows the exceptions")
    assert "of this host failed" not in outcome.output and outcome.leftovers == ()
