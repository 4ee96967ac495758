"""Threads and cores of a rank, and who started it."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest

from lightning_lockstep.launchers.environments import (
    LockstepEnvironment,
    SlurmStepEnvironment,
    detect_environment,
    requeue_signal,
)
from lightning_lockstep.launchers.rank_supervisor import plan_threads


@pytest.mark.parametrize(
    ("asked", "cores", "ranks", "expected"),
    [
        ("auto", 8, 2, [(4, (0, 1, 2, 3)), (4, (4, 5, 6, 7))]),
        ("auto", 2, 4, [(1, (0,)), (1, (1,)), (1, (0,)), (1, (1,))]),
        (3, 8, 2, [(3, (0, 1, 2)), (3, (3, 4, 5))]),
        (16, 2, 2, [(16, (0, 1)), (16, (0, 1))]),
    ],
)
def test_the_cores_are_shared_out(asked: object, cores: int, ranks: int, expected: list[object]) -> None:
    plans = [
        plan_threads(asked, cores=tuple(range(cores)), local_rank=rank, local_world_size=ranks)  # type: ignore[arg-type]
        for rank in range(ranks)
    ]
    assert plans == expected


def test_nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "TORCHELASTIC", "LSB_", "LOCAL_RANK")):
            monkeypatch.delenv(name)
    environment = detect_environment()
    assert isinstance(environment, LockstepEnvironment)
    assert not environment.creates_processes_externally


def test_a_single_task_of_slurm_is_not_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    assert isinstance(detect_environment(), LockstepEnvironment)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert isinstance(detect_environment(), LockstepEnvironment), "a batch script"
    assert requeue_signal(detect_environment()) is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert isinstance(detect_environment(), SlurmStepEnvironment)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert isinstance(detect_environment(), LockstepEnvironment)
    assert requeue_signal(detect_environment()) is signal.SIGUSR1, "but srun has started it"


def test_a_machine_that_has_srun_is_not_warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(detect_environment(), LockstepEnvironment)


def test_torchrun_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    assert type(detect_environment()).__name__ == "TorchElasticEnvironment"
