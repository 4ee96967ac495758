"""How many ranks others have started, and how many of them on this node."""

from __future__ import annotations

import os

import pytest
from omegaconf import OmegaConf

from lightning_lockstep._application.checks import prepare_training
from lightning_lockstep._application.config_channel import external_ranks

JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_NODELIST": "n[1-2]"}


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "TORCHELASTIC", "OMPI_", "PMI", "LSB_", "LOCAL_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("of_job", "of_step", "devices", "nodes"),
    [
        # srun -N1 -n2 in a job of --nodes=1 --ntasks-per-node=4
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "1"}, {"NUM_TASKS": "2", "TASKS_PER_NODE": "2"}, 2, 1),
        # srun -N1 -n3 in a job of two nodes
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"}, {"NUM_TASKS": "3", "TASKS_PER_NODE": "3"}, 3, 1),
        ({"SLURM_NNODES": "2"}, {"NUM_TASKS": "4", "TASKS_PER_NODE": "2(x2)"}, 2, 2),
    ],
)
def test_a_step_of_slurm_has_the_devices_of_its_own_tasks(
    of_job: dict[str, str],
    of_step: dict[str, str],
    devices: int,
    nodes: int,
    tmp_path: os.PathLike[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = {f"SLURM_STEP_{name}": value for name, value in of_step.items()}
    for name, value in {**JOB, **of_job, **step, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    ranks = external_ranks()
    assert ranks is not None and (ranks.count, ranks.per_node) == (devices * nodes, devices)
    runtime = {"output_dir": str(tmp_path), "cwd": str(tmp_path)}
    config = OmegaConf.create(
        {"ckpt_path": None, "trainer": {"devices": "auto", "num_nodes": 1}, "hydra": {"runtime": runtime}}
    )
    prepare_training(config)
    assert (config.trainer.devices, config.trainer.num_nodes) == (devices, nodes)
