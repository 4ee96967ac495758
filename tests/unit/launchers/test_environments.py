"""Who started a rank, and whether the Trainer has as many devices as there are ranks."""

from __future__ import annotations

import os
import signal

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.environments import (
    LockstepEnvironment,
    SlurmStepEnvironment,
    check_has_device,
    detect_environment,
    requeue_signal,
)
from lightning_lockstep.launchers.rank_variables import StartedRank


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


class ElasticEnvironment(LockstepEnvironment):
    """A second rank that somebody else has started, who says nothing of the number of devices."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return 1


def second_of_three() -> SlurmStepEnvironment:
    step = StartedRank("srun", 1, 3, 1, 2, node=0, per_node=(2, 1), step="7.0.0@here", nodes="n")
    return SlurmStepEnvironment(step)


def test_a_rank_without_a_device_is_told_what_srun_has_started() -> None:
    with pytest.raises(LaunchError, match=r"3 were started, 2\+1 on each of 2 nodes"):
        check_has_device(second_of_three(), num_devices=1, num_nodes=3)


def test_a_rank_without_a_device_is_told_how_many_there_are() -> None:
    with pytest.raises(LaunchError, match="devices=1, but at least 2 ranks were started on this node"):
        check_has_device(ElasticEnvironment(), num_devices=1, num_nodes=1)


def test_several_nodes_that_cannot_find_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for strategy in ("lockstep_ddp", "lockstep_ddp_spawn"):
        trainer = Trainer(accelerator="cpu", devices=1, num_nodes=2, strategy=strategy, logger=False)
        with pytest.raises(LaunchError, match="num_nodes=2: expected MASTER_ADDR, MASTER_PORT and NODE_RANK in"):
            trainer.fit(BoringModel())
