"""`lockstep-train` on ranks that others start, alone, and where a machine has less than usual."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import run_script
from tests.models.application.command_lines import MINE, TORCHRUN, TRAIN
from tests.models.distributed.mpi.launch import mpi_environ
from tests.programs.application.test_lockstep_train import QUICK

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
