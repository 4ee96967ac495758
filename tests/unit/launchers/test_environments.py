"""Who started a rank."""

from __future__ import annotations

import os
import signal

import pytest

from lightning_lockstep.launchers.environments import (
    LockstepEnvironment,
    SlurmStepEnvironment,
    detect_environment,
    requeue_signal,
)


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


def test_torchrun_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    assert type(detect_environment()).__name__ == "TorchElasticEnvironment"
