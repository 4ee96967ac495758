"""`lockstep-train` from the command line, on real ranks and real data."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_lockstep.doctor.checks.run import run
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import CheckOptions
from tests.helpers import ScriptOutcome, run_script, start_script

QUICK = ("trainer.enable_progress_bar=false", "trainer.accelerator=cpu")


def lockstep_train(*arguments: str, cwd: Path, **env: str) -> ScriptOutcome:
    command = [sys.executable, "-m", "lightning_lockstep.train", *arguments]
    return run_script(command, env=env, cwd=cwd, timeout=180)


def column(run: Path, name: str) -> list[float]:
    with open(run / "csv" / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def summary(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded


@pytest.mark.skipif(os.geteuid() != 0, reason="a private mount of /dev/shm needs root")
def test_one_rank_needs_no_shared_memory(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "lightning_lockstep.train", *QUICK, "trainer.max_steps=1", "test=false")
    read_only = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o ro none /dev/shm && exec "$@"',
        "sh",
        *command,
    ]
    outcome = run_script(read_only, cwd=tmp_path, timeout=180)
    assert outcome.returncode == 0, outcome.output
    assert "run finished" in outcome.stdout


def test_two_ranks_learn_the_digits_like_one_and_resume(tmp_path: Path) -> None:
    """One test for three runs, because each costs ten seconds of imports."""
    same = (*QUICK, "data.global_batch_size=64", "trainer.max_epochs=3")
    one = lockstep_train(*same, "trainer.devices=1", "hydra.run.dir=runs/one", cwd=tmp_path)
    two = lockstep_train(*same, "trainer.devices=2", "hydra.run.dir=runs/two", cwd=tmp_path)
    for outcome in (one, two):
        assert outcome.returncode == 0, outcome.output
        assert not outcome.leftovers
    first, second = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    losses = column(first, "train_loss"), column(second, "train_loss")
    assert len(losses[0]) == len(losses[1]) == 63
    # The sums of one and of two ranks differ by a rounding, which every step makes larger; in float64 they stay
    # together (tests/programs/batch_size/test_same_run.py).
    assert max(abs(a - b) for a, b in list(zip(*losses, strict=True))[:21]) < 1e-4
    result = summary(second)
    assert min(run["metrics"]["val_acc"] for run in (summary(first), result)) >= 0.95
    assert (result["steps"], result["epochs"], result["ranks"]) == (63, 3, 2)
    assert result["samples_per_second"] > 0
    assert Path(result["files"]["last checkpoint"]).is_file()
    assert "run finished" in two.stdout
    assert two.stdout.count("run finished") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"], "one folder for all ranks"

    more = lockstep_train(
        *QUICK,
        "data.global_batch_size=64",
        "trainer.max_epochs=4",
        "trainer.devices=2",
        "ckpt_path=last",
        "hydra.run.dir=runs/three",
        cwd=tmp_path,
    )
    assert more.returncode == 0, more.output
    assert more.stderr.count(" at epoch 3, optimizer step 63") == 1, more.stderr
    assert "lightning-lockstep: resuming from " in more.stderr
    resumed = summary(tmp_path / "runs" / "three")
    assert resumed["steps"] == 84
    assert resumed["files"]["resumed from"] == result["files"]["last checkpoint"]
    assert "checkpoint at" not in more.output, "the table says it"
    assert len(column(tmp_path / "runs" / "three", "train_loss")) == 21, "only the fourth epoch was run"


def test_a_sweep_starts_the_ranks_of_each_job(tmp_path: Path) -> None:
    outcome = lockstep_train(
        "-m",
        *QUICK,
        "trainer.devices=2",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=4",
        "seed=1,2",
        "hydra.sweep.dir=sweep",
        cwd=tmp_path,
    )
    assert outcome.returncode == 0, outcome.output
    assert not outcome.leftovers
    sweep = tmp_path / "sweep"
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "multirun.yaml"]
    assert not list(sweep.rglob("*.log")), "nothing was logged"
    assert [summary(sweep / job)["ranks"] for job in ("0", "1")] == [2, 2]
    assert column(sweep / "0", "train_loss") != column(sweep / "1", "train_loss")
    for job in ("0", "1"):
        loss = summary(sweep / job)["metrics"]["val_loss"]
        assert re.search(rf"{job} .*seed={int(job) + 1} +val_loss {loss:.4g} +sweep/{job}", outcome.stderr)


def test_torchrun_makes_one_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "lightning_lockstep.train", *QUICK, "data=source_text", "model=byte_gpt"]
    outcome = run_script(
        [*command, "trainer.max_steps=5", "data.max_bytes=100000", "logger=[csv,tensorboard]"],
        cwd=tmp_path,
        timeout=180,
    )
    assert outcome.returncode == 0, outcome.output
    [run] = (tmp_path / "outputs" / "train").iterdir()
    result = summary(run)
    assert (result["steps"], result["ranks"]) == (5, 2)
    assert {"val_loss", "val_acc", "test_loss"} <= set(result["metrics"]), (
        "validated though it ended mid-epoch"
    )
    assert list((run / "tensorboard").glob("events.*"))
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert not list(tmp_path.rglob("*.log")), "nothing was logged"


def test_a_run_of_torchrun_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    same = [*QUICK, "data.global_batch_size=64", "trainer.devices=2", "trainer.max_epochs=1", "test=false"]
    whole = lockstep_train(*same, "hydra.run.dir=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.output
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "lightning_lockstep.train", *same, "hydra.run.dir=cut"]
    for more in ("trainer.max_steps=9", "ckpt_path=auto"):
        outcome = run_script([*command, more], cwd=tmp_path, timeout=180)
        assert outcome.returncode == 0, outcome.output
    losses = column(tmp_path / "whole", "train_loss")
    with open(tmp_path / "cut" / "csv" / "attempt-1" / "metrics.csv", newline="") as file:
        resumed = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert resumed == losses[9:] and len(resumed) > 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_says_how_far_the_run_came_and_how_it_goes_on(ranks: int, tmp_path: Path) -> None:
    arguments = [*QUICK, f"trainer.devices={ranks}", "trainer.max_epochs=1000", "seed=7"]
    command = [sys.executable, "-m", "lightning_lockstep.train", *arguments, "hydra.run.dir=out"]
    with start_script(command, cwd=tmp_path) as script:
        deadline = time.monotonic() + 120
        while not (tmp_path / "out" / "checkpoints" / "last.ckpt").exists():
            assert time.monotonic() < deadline, script.stderr
            time.sleep(0.1)
        script.interrupt()
        outcome = script.finish(60)
    assert outcome.returncode == 130, outcome.output
    assert "Traceback" not in outcome.output
    said = re.search(
        r"interrupted after optimizer step (\d+)\.\n  newest checkpoint: (\S+)\n.*: +(.+)", outcome.stderr
    )
    assert said is not None, outcome.stderr
    assert (tmp_path / said[2]).is_file()
    assert said[3] == f"lockstep-train {' '.join(arguments)} ckpt_path={said[2]}"
    found = list(run(Machine(), CheckOptions(folders=(str(tmp_path / "out"),))))
    assert "interrupted by Ctrl-C" in found[0].evidence and f"step {said[1]}" in found[0].evidence, found
    assert not any("still be running" in finding.evidence for finding in found)
    assert found[-1].fix[0].startswith(f"lockstep-train {' '.join(arguments)} ckpt_path=")


def test_a_wrong_command_line_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    outcome = lockstep_train("strategy=dpp", "trainer.max_epochz=3", "data.batch_size=-1", cwd=run)
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("lockstep-train: 3 errors in the configuration; nothing was started.")
    assert "Traceback" not in outcome.output
    assert list(run.iterdir()) == []


def test_what_a_users_own_constructor_objects_to_is_a_message_too(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from lightning_lockstep.demo.images import ConvNet\n"
        "class Own(ConvNet):\n"
        "    def __init__(self, width: int):\n"
        "        raise ValueError('width is out of fashion')\n"
    )
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "fashion.yaml").write_text("_target_: own.Own\nwidth: 8\n")
    outcome = lockstep_train(
        "--config-dir", "conf", "model=fashion", cwd=tmp_path, PYTHONPATH=path_with(tmp_path)
    )
    assert outcome.returncode == 2, outcome.output
    assert "1. model: width is out of fashion" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_settings_that_all_ranks_refuse_once_they_have_met_are_one_message_too(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from lightning_lockstep import ConfigurationError\n"
        "from lightning_lockstep.demo.images import ConvNet\n"
        "class Own(ConvNet):\n"
        "    def on_fit_start(self):\n"
        "        raise ConfigurationError('width=8: expected an even wider one.')\n"
    )
    choice = ("strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "model._target_=own.Own")
    outcome = lockstep_train(*choice, "model.width=8", cwd=tmp_path, PYTHONPATH=path_with(tmp_path))
    assert outcome.returncode == 2, outcome.output
    assert "one error in the configuration; all ranks were stopped." in outcome.stderr
    assert outcome.stderr.rstrip().splitlines()[-1] == "HYDRA_FULL_ERROR=1 shows the exceptions behind this."
    assert "of this host failed" not in outcome.output and outcome.leftovers == ()


def path_with(folder: Path) -> str:
    import os

    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
