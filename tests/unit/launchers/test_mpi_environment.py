"""Ranks are recognised by environment variables alone, and disagreement is one table."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_lockstep.distributed.mpi.runtime import RankIdentity, identity_fault
from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError
from lightning_lockstep.launchers.environments import MPIEnvironment
from lightning_lockstep.launchers.mpi_hosts import Host, HostReport, hosts_fault, hosts_for, read_hostfile
from lightning_lockstep.launchers.mpirun_command import MPIRunSettings
from lightning_lockstep.launchers.rank_variables import MPIRank, find_mpi_rank
from lightning_lockstep.strategies.mpi import LockstepMPIStrategy

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_open_mpi(tmp_path: Path) -> None:
    alive = {**OPEN_MPI, "PMIX_NAMESPACE": "job", "PMIX_SERVER_TMPDIR": str(tmp_path)}
    assert find_mpi_rank(alive) == MPIRank("Open MPI's mpirun", 3, 4, 1, 2)


def test_variables_left_behind_are_no_mpi(tmp_path: Path) -> None:
    assert find_mpi_rank({}) is None
    assert find_mpi_rank(OPEN_MPI) is None
    assert (
        find_mpi_rank({**OPEN_MPI, "PMIX_NAMESPACE": "job", "PMIX_SERVER_TMPDIR": str(tmp_path / "gone")})
        is None
    )
    assert find_mpi_rank({"PMI_RANK": "0", "PMI_SIZE": "4", "PMI_FD": "9999"}) is None


def test_mpich_and_intel_mpi() -> None:
    with open(os.devnull) as stream:
        found = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": str(stream.fileno())}
        local = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
        assert find_mpi_rank(found | local) == MPIRank("MPICH's mpiexec", 1, 2, 1, 2)
        assert find_mpi_rank(found | local | {"I_MPI_ROOT": "/opt"}) == MPIRank(
            "Intel MPI's mpiexec", 1, 2, 1, 2
        )


def test_mvapich() -> None:
    environ = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
    assert find_mpi_rank(environ) == MPIRank("MVAPICH's mpirun", 3, 4, 1, 2)


def test_srun() -> None:
    step = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    step["SLURM_STEP_TASKS_PER_NODE"] = "4(x2)"
    assert find_mpi_rank({**step, "PMIX_RANK": "5"}) == MPIRank("srun", 5, 8, 1, 4)
    assert find_mpi_rank(step) is None, "srun without --mpi"
    assert find_mpi_rank({**step, "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None, "a single task"


def test_the_trainer_and_mpirun_disagree() -> None:
    environment = MPIEnvironment(MPIRank("Open MPI's mpirun", 0, 4, 0, 2))
    environment.validate_settings(num_devices=2, num_nodes=2)
    with pytest.raises(LaunchError, match="disagree") as caught:
        environment.validate_settings(num_devices=3, num_nodes=1)
    assert "Trainer (devices x num_nodes)  3      3" in str(caught.value)
    assert "Open MPI's mpirun              4      2                   2" in str(caught.value)


def identity(rank: int, mpi_rank: int, host: str) -> RankIdentity:
    return RankIdentity(rank, mpi_rank, 3, rank, 3, host, (0, 1))


def test_unequal_slots_and_foreign_numbers_are_a_table() -> None:
    fault = identity_fault([identity(i, i, "ab"[i > 1]) for i in range(3)])
    assert fault is not None and "different numbers of ranks" in fault
    fault = identity_fault([identity(2 - i, i, "a") for i in range(3)])
    assert fault is not None and "MPI disagree" in fault
    assert identity_fault([identity(i, i, "a") for i in range(3)]) is None


def test_hostfiles_of_both_kinds(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# comment\nnode1 slots=4\nnode2:2\n\nnode3\n")
    assert read_hostfile(file) == [Host("node1", 4), Host("node2", 2), Host("node3", None)]
    file.write_text("fd77::1 slots=4\n[fd77::2]:2\n[fd77::3]\nfd77::4\n")
    assert read_hostfile(file) == [Host("fd77::1", 4), Host("fd77::2", 2), Host("fd77::3"), Host("fd77::4")]
    with pytest.raises(ConfigurationError, match="there is no such file"):
        MPIRunSettings(hostfile=tmp_path / "none")


def test_a_name_that_ssh_would_take_for_an_option_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1 slots=2\nuser@node2 slots=2\n-oProxyCommand=touch slots=2\n")
    with pytest.raises(LaunchError, match=r"name or address of a host: '-oProxyCommand=touch'\. Expected"):
        hosts_for(MPIRunSettings(hostfile=file), num_processes=2, num_nodes=1)


def test_the_table_of_hosts_says_what_to_do() -> None:
    here = HostReport("here", "local", "3.11.7", {"torch": "2.13.0"})
    reports = [
        HostReport("fine", "ok", "3.11.7", {"torch": "2.13.0"}),
        HostReport("old", "ok", "3.11.7", {"torch": "2.9.0"}),
        HostReport("strange", "ok", "3.12.1", {"torch": "2.13.0"}),
        HostReport("closed", "root@closed: Permission denied (publickey)."),
        HostReport("nowhere", "ssh: Could not resolve hostname nowhere: Name or service not known"),
        HostReport("deaf", "ssh: connect to host deaf port 22: Connection refused"),
        HostReport("bare", "ok", "/usr/bin/python does not run there"),
    ]
    table = hosts_fault(reports, here)
    assert table is not None
    for text in (
        "ready",
        "torch 2.9.0 there, 2.13.0 here",
        "Python 3.12.1 there",
        "ssh-copy-id closed",
        "does not resolve",
        "nothing listens for ssh",
        "does not run there",
    ):
        assert text in table
    assert hosts_fault(reports[:1], here) is None


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
    monkeypatch.setattr("lightning_lockstep.strategies.mpi.find_mpirun", lambda settings: None)
    with pytest.raises(LaunchError, match=r"There is no mpirun .* or give mpirun=.* lockstep_ddp"):
        fit_of_two()


def test_what_auto_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(ranks: int, environment: object, device: str = "cpu") -> str:
        made = SimpleNamespace(
            cluster_environment=environment,
            num_processes=ranks,
            num_nodes=1,
            root_device=torch.device(device),
        )
        return LockstepMPIStrategy().make_startup()._choose_backend(made)  # type: ignore[attr-defined,no-any-return]

    by_mpi = MPIEnvironment(MPIRank("Open MPI's mpirun", 0, 2, 0, 2))
    assert chosen(1, LightningEnvironment()) == "gloo", "one rank sends nothing"
    assert chosen(2, LightningEnvironment(), "cuda") == "nccl"
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: object())
    assert chosen(2, by_mpi) == "mpi4py"
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None)
    with pytest.raises(MissingExtraError, match="lightning-lockstep\\[mpi\\]"):
        chosen(2, by_mpi)
    assert chosen(1, LightningEnvironment()) == "gloo"
