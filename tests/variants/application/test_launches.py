"""`lockstep-train` on ranks that others start, alone, and where a machine has less than usual."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.harness import run_script
from tests.models.application.command_lines import MINE, TORCHRUN, TRAIN
from tests.models.distributed.mpi.launch import mpi_environ
from tests.programs.application.test_lockstep_train import QUICK, SAME, Run, column, trained
from tests.programs.application.test_quick_answers import ASKED, asked

OWN = ("model=own", "model._target_=mine.Net", "data=own", "data._target_=mine.Data", "trainer.max_epochs=1")


def test_spawned_ranks_find_classes_in_the_folder_of_the_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    spawn = ("trainer.devices=2", "strategy.start_method=spawn")
    outcome = run_script([*TRAIN, *spawn, *OWN, *QUICK], cwd=tmp_path, timeout=180)
    assert outcome.returncode == 0, outcome.output
    assert outcome.stdout.count("run finished") == 1, outcome.output


def test_other_devices_than_torchrun_has_started_are_one_error_on_all_ranks(tmp_path: Path) -> None:
    outcome = run_script([*TORCHRUN, *QUICK, "strategy=ddp", "trainer.devices=1"], cwd=tmp_path, timeout=120)
    assert outcome.output.count("one error in the configuration; the run has ended.") == 1, outcome.output
    assert "1. trainer.devices=1: You set `devices=1` and `num_nodes=1` in Lightning" in outcome.output
    assert "exitcode  : 2" in outcome.output and "hydra/_internal" not in outcome.output


@pytest.mark.skipif(os.geteuid() != 0, reason="a private mount of /dev/shm needs root")
def test_one_rank_needs_no_shared_memory(tmp_path: Path) -> None:
    mounted = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro none /dev/shm && exec "$@"', "sh"]
    outcome = run_script([*mounted, *TRAIN, *QUICK, "trainer.max_steps=1", "test=false"], cwd=tmp_path, timeout=180)
    assert outcome.returncode == 0, outcome.output
    assert "run finished" in outcome.stdout


@pytest.mark.mpi
def test_a_machine_without_a_problem_trains(tmp_path: Path) -> None:
    small = [
        "data=source_text",
        "model=byte_gpt",
        "data.max_bytes=60000",
        "trainer.max_steps=2",
        "test=false",
    ]
    command = [
        *TRAIN,
        "debug=preflight",
        "trainer.accelerator=cpu",
        *small,
        "trainer.devices=1",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    outcome = run_script(command, env=mpi_environ(), timeout=120)
    assert outcome.returncode == 0, outcome.output
    assert "2 checks in" in outcome.stderr and (tmp_path / "run" / "summary.json").exists()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks that the strategy starts."""
    cwd = tmp_path_factory.mktemp("two")
    return trained(TRAIN, *SAME, "trainer.devices=2", "hydra.run.dir=two", cwd=cwd, folder=cwd / "two")


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ranks of torchrun that do as the two, and end after 30 of 42 steps."""
    cwd = tmp_path_factory.mktemp("torchrun")
    made = trained(TORCHRUN, *SAME, "trainer.max_steps=30", "logger=[csv]", cwd=cwd, folder=cwd)
    [folder] = (cwd / "outputs" / "train").iterdir()
    return Run(made.outcome, folder)


def test_torchrun_makes_one_folder(cut: Run, two: Run) -> None:
    result = cut.summary
    assert (result["steps"], result["ranks"]) == (30, 2)
    assert {"val_loss", "val_acc", "test_loss"} <= set(result["metrics"])
    of_epoch_0 = column(cut.folder / "csv" / "metrics.csv", "val_loss")[0]
    assert result["metrics"]["val_loss"] != of_epoch_0, "it ended in mid-epoch, so it was validated once more"
    assert (cut.folder / "checkpoints" / "last.ckpt").is_file()
    assert not list(cut.folder.rglob("*.log")), "nothing was logged"
    losses = column(two.folder / "csv" / "metrics.csv", "train_loss")
    assert column(cut.folder / "csv" / "metrics.csv", "train_loss") == losses[:30]


def test_a_run_of_torchrun_goes_on_with_the_next_batch(cut: Run, two: Run) -> None:
    arguments = (*SAME, "ckpt_path=auto", f"hydra.run.dir={cut.folder}", "test=false")
    resumed = trained(TORCHRUN, *arguments, cwd=cut.folder, folder=cut.folder)
    losses = column(two.folder / "csv" / "metrics.csv", "train_loss")
    assert column(cut.folder / "csv" / "attempt-1" / "metrics.csv", "train_loss") == losses[30:]
    assert resumed.outcome.stderr.count("lightning-lockstep: resuming from ") == 1
    assert resumed.outcome.stderr.count(", optimizer step 30") == 1, resumed.outcome.stderr
    assert resumed.summary["steps"] == 42
    assert resumed.summary["files"]["resumed from"] == str(cut.folder / "checkpoints" / "last.ckpt")


def test_nodes_started_by_hand_do_not_wait_for_each_other_to_show_help() -> None:
    """At the port where they would meet somebody else listens, so an attempt to meet is an error."""
    questions = ("--help", "--cfg job")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        first, second = (asked(*questions, **place, NODE_RANK=number) for number in "01")
    for question in questions:
        assert ASKED[question] in first[question] and "Traceback" not in first[question], first
        assert second[question].strip() == "", second
