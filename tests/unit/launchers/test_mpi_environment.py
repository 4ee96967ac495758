"""Ranks are recognised by environment variables alone, and disagreement is one table."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError
from lightning_lockstep.launchers.environments import MPIEnvironment
from lightning_lockstep.launchers.mpirun_command import MPIRunSettings, read_hostfile
from lightning_lockstep.launchers.rank_variables import StartedRank, find_mpi_rank
from lightning_lockstep.strategies.mpi import LockstepMPIStrategy
from lightning_lockstep.strategies.startup import MPIStartup

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_open_mpi(tmp_path: Path) -> None:
    alive = {**OPEN_MPI, "PMIX_NAMESPACE": "job", "PMIX_SERVER_TMPDIR": str(tmp_path)}
    assert find_mpi_rank(alive) == StartedRank("Open MPI's mpirun", 3, 4, 1, 2, node=1, per_node=(2, 2))


def test_variables_left_behind_are_no_mpi(tmp_path: Path) -> None:
    assert find_mpi_rank({}) is None
    assert find_mpi_rank(OPEN_MPI) is None
    assert find_mpi_rank({**OPEN_MPI, "PMIX_NAMESPACE": "job", "PMIX_SERVER_TMPDIR": str(tmp_path / "gone")}) is None
    assert find_mpi_rank({"PMI_RANK": "0", "PMI_SIZE": "4", "PMI_FD": "9999"}) is None


def test_mpich_and_intel_mpi() -> None:
    with open(os.devnull) as stream:
        found = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": str(stream.fileno())}
        local = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
        assert find_mpi_rank(found | local) == StartedRank("mpiexec", 1, 2, 1, 2, node=0, per_node=(2,))


def test_mvapich() -> None:
    environ = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
    assert find_mpi_rank(environ) == StartedRank("MVAPICH's mpirun", 3, 4, 1, 2, node=1, per_node=(2, 2))


def test_srun() -> None:
    step = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    step["SLURM_STEP_TASKS_PER_NODE"] = "4(x2)"
    rank = find_mpi_rank({**step, "PMIX_RANK": "5"})
    assert rank is not None and rank.step is not None
    assert (rank.rank, rank.size, rank.local_rank, rank.local_size, rank.node) == (5, 8, 1, 4, 1)
    assert find_mpi_rank(step) is None, "srun without --mpi"
    assert find_mpi_rank({**step, "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None, "a single task"


def test_the_trainer_and_mpirun_disagree() -> None:
    environment = MPIEnvironment(StartedRank("Open MPI's mpirun", 0, 4, 0, 2, node=0, per_node=(2, 2)))
    environment.validate_settings(num_devices=2, num_nodes=2)
    with pytest.raises(LaunchError, match="are 3 ranks, and 4 were started, 2 on each of 2 nodes"):
        environment.validate_settings(num_devices=3, num_nodes=1)


def test_hostfiles_of_both_kinds(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# comment\nnode1 slots=4\nnode2:2\n\nnode3\n")
    assert read_hostfile(file) == ["node1", "node2", "node3"]
    file.write_text("fd77::1 slots=4\n[fd77::2]:2\n[fd77::3]\nfd77::4\n")
    assert read_hostfile(file) == ["fd77::1", "fd77::2", "fd77::3", "fd77::4"]
    with pytest.raises(ConfigurationError, match="there is no such file"):
        MPIRunSettings(hostfile=tmp_path / "none")


def test_a_name_that_mpirun_would_take_for_an_option_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1 slots=2\nuser@node2 slots=2\n-oProxyCommand=touch slots=2\n")
    with pytest.raises(LaunchError, match=r"'-oProxyCommand=touch' is not the name of a host\. Expected"):
        read_hostfile(file)


def test_all_wrong_options_come_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        LockstepMPIStrategy(backend="mpich", start_method="spawn", process_group_backend="gloo")  # type: ignore[arg-type]
    assert len(caught.value.faults) == 3
    with pytest.raises(ConfigurationError, match="built without MPI"):
        LockstepMPIStrategy(backend="mpi")


def fit_of_two() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=1,
        strategy="lockstep_mpi",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(BoringModel())


def test_without_mpirun_nothing_else_starts_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_lockstep.strategies.startup.find_mpirun", lambda settings: None)
    with pytest.raises(LaunchError, match=r"There is no mpirun .* or give mpirun=.* lockstep_ddp"):
        fit_of_two()


def test_what_auto_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(ranks: int, environment: object, device: str = "cpu", backend: str = "auto") -> str:
        made = SimpleNamespace(
            cluster_environment=environment,
            num_processes=ranks,
            num_nodes=1,
            root_device=torch.device(device),
        )
        return MPIStartup(backend, MPIRunSettings())._choose_backend(made)

    by_mpi = MPIEnvironment(StartedRank("Open MPI's mpirun", 0, 2, 0, 2, node=0, per_node=(2,)))
    assert chosen(1, LightningEnvironment()) == "gloo", "one rank sends nothing"
    assert chosen(2, LightningEnvironment(), "cuda") == "nccl"
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: object())
    assert chosen(2, by_mpi) == "mpi4py"
    with pytest.raises(ConfigurationError, match=r"sends CPU tensors only.* is cuda: leave backend at 'auto'"):
        chosen(2, by_mpi, "cuda", "mpi4py")
    with pytest.raises(LaunchError, match=r"\(found: TorchElasticEnvironment\).* give backend='gloo'"):
        chosen(2, TorchElasticEnvironment())
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[mpi\]'"):
        chosen(2, by_mpi)
    assert chosen(1, LightningEnvironment()) == "gloo"
