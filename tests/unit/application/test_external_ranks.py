"""How many ranks others have started, and how many of them on this node."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from lightning_lockstep._application import config_channel
from lightning_lockstep._application.checks import prepare_training
from lightning_lockstep._application.config_channel import ConfigChannel, Message
from lightning_lockstep.distributed import rendezvous
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.external_ranks import ExternalRanks, external_ranks

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
        (
            {"SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "1"},
            {"NUM_TASKS": "2", "TASKS_PER_NODE": "2"},
            2,
            1,
        ),
        # srun -N1 -n3 in a job of two nodes
        (
            {"SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"},
            {"NUM_TASKS": "3", "TASKS_PER_NODE": "3"},
            3,
            1,
        ),
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


def test_a_store_that_is_lost_is_said_with_the_time_that_was_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")

    channel = ConfigChannel(ExternalRanks(1, 2, 1, "here", 29500))
    monkeypatch.setattr(channel, "_store", lambda timeout: SimpleNamespace(check=check))
    text = "received no configuration from rank 0 in 0 s, and then lost its connection, at here:29500"
    with pytest.raises(LaunchError, match=text):
        channel.receive()


def test_rank_0_of_one_node_started_by_hand_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = ConfigChannel(ExternalRanks(0, None, 1, "here", 29500))
    channel.nodes = 1
    store = SimpleNamespace(set=lambda key, value: None, add=lambda key, amount: 0)
    monkeypatch.setattr(channel, "_store", lambda: store)
    monkeypatch.setattr(config_channel.time, "sleep", lambda seconds: pytest.fail("it waits"))
    channel.close(0, unusable=False)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "LOCKSTEP_JOB_TOKEN": "secret"}, False),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}, False),
    ],
)
def test_a_configuration_that_goes_to_other_hosts_without_a_signature_is_announced_once(
    environment: dict[str, str],
    says: bool,
    tmp_path: os.PathLike[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("LOCKSTEP_JOB_TOKEN", raising=False)
    monkeypatch.setattr(rendezvous, "_made", None)
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    channel = ConfigChannel(ExternalRanks(0, 4, 2, "node1", 29500))
    monkeypatch.setattr(channel, "_store", lambda: SimpleNamespace(set=lambda *_: None))
    for last in (False, True):
        channel.send(Message(OmegaConf.create({}), last=last))
    channel.send(Message(exit_code=2))
    assert capsys.readouterr().err.count("the same LOCKSTEP_JOB_TOKEN") == says
