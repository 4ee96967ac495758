"""Ranks that mpirun, mpiexec or srun has started, recognised by environment variables alone.

=============== ====================================== =======================================
started by      rank and size                          it is alive if
=============== ====================================== =======================================
Open MPI        ``OMPI_COMM_WORLD_RANK``, ``_SIZE``    its session folder is there
MVAPICH         ``MV2_COMM_WORLD_RANK``, ``_SIZE``     (always)
Slurm           ``SLURM_PROCID``, ``SLURM_STEP_...``   there are ``PMI_*`` or ``PMIX_*`` too
MPICH, Intel    ``PMI_RANK``, ``PMI_SIZE``             the descriptor ``PMI_FD`` is open
=============== ====================================== =======================================

A shell that was started inside a job, or an `export` left behind, has such variables without being a rank;
the last column tells. mpi4py is not imported here: that would start MPI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_lockstep._lightning import ClusterEnvironment
from lightning_lockstep.distributed.mpi.rendezvous import MPIRendezvous, meet
from lightning_lockstep.errors import LaunchError

__all__ = ["RANK_VARIABLES", "MPIEnvironment", "MPIRank", "find_mpi_rank"]

#: Each rank that an mpirun or mpiexec has started has one of these.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True)
class MPIRank:
    """Who this process is, as the program that started it says.

    Attributes:
        started_by: Name of that program.
        rank: Number of the rank, from 0.
        size: Number of ranks.
        local_rank: Number of the rank on its node, from 0.
        local_size: Number of ranks on its node.
    """

    started_by: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def find_mpi_rank(environ: Mapping[str, str] | None = None) -> MPIRank | None:
    """Return who this process is in an MPI job, or ``None`` when it is not part of one.

    Args:
        environ: Environment variables; by default those of this process.

    Ranks: any rank, alone; nothing is sent and no MPI is started.
    """
    environ = os.environ if environ is None else environ
    for find in (_open_mpi, _mvapich, _slurm, _hydra):
        found = find(environ)
        if found is not None:
            return found
    return None


def _open_mpi(environ: Mapping[str, str]) -> MPIRank | None:
    numbers = _numbers(environ, "OMPI_COMM_WORLD_{}", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    session = environ.get("PMIX_SERVER_TMPDIR") or environ.get("OMPI_FILE_LOCATION")
    if numbers is None or (session and not Path(session).exists()):
        return None
    if not any(name.startswith(("PMIX_", "OMPI_MCA_orte_", "OMPI_MCA_ess_")) for name in environ):
        return None
    return MPIRank("Open MPI's mpirun", *numbers)


def _mvapich(environ: Mapping[str, str]) -> MPIRank | None:
    numbers = _numbers(environ, "MV2_COMM_WORLD_{}", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return MPIRank("MVAPICH's mpirun", *numbers) if numbers else None


def _slurm(environ: Mapping[str, str]) -> MPIRank | None:
    size = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    by_mpi = any(name.startswith(("PMI_", "PMI2_", "PMIX_")) for name in environ)
    if "SLURM_PROCID" not in environ or not size.isdigit() or int(size) < 2 or not by_mpi:
        return None
    local = environ.get("SLURM_LOCALID", "0")
    return MPIRank(
        "srun", int(environ["SLURM_PROCID"]), int(size), int(local), _slurm_tasks(environ, int(size))
    )


def _slurm_tasks(environ: Mapping[str, str], size: int) -> int:
    """Return how many tasks this node has, of a list such as ``2(x3),1``."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", str(size))
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(count)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else size


def _hydra(environ: Mapping[str, str]) -> MPIRank | None:
    numbers = _numbers(environ, "PMI_{}", ("RANK", "SIZE"))
    descriptor = environ.get("PMI_FD", "")
    if numbers is None or not (_is_open(descriptor) or "PMI_PORT" in environ):
        return None
    local = _numbers(environ, "MPI_{}", ("LOCALRANKID", "LOCALNRANKS")) or numbers
    intel = any(name.startswith("I_MPI_") for name in environ)
    return MPIRank("Intel MPI's mpiexec" if intel else "MPICH's mpiexec", *numbers, *local)


def _is_open(descriptor: str) -> bool:
    try:
        os.fstat(int(descriptor))
    except (ValueError, OSError):
        return False
    return True


def _numbers(environ: Mapping[str, str], pattern: str, names: tuple[str, ...]) -> list[int] | None:
    values = [environ.get(pattern.format(name), "") for name in names]
    return [int(value) for value in values] if all(value.isdigit() for value in values) else None


class MPIEnvironment(ClusterEnvironment):
    """The cluster environment of ranks of an MPI job.

    Where they meet is agreed upon over MPI itself when first asked for, so no port is fixed and several jobs
    on a host do not collide.

    Args:
        rank: Who this process is; by default found in the environment variables.

    Ranks: every rank of the job makes one.
    """

    def __init__(self, rank: MPIRank | None = None) -> None:
        super().__init__()
        found = rank or find_mpi_rank()
        if found is None:
            raise LaunchError(
                "This process is no rank of an MPI job: expected to be started by mpirun, mpiexec or srun"
                " --mpi=..."
            )
        self.mpi_rank = found

    @staticmethod
    def detect() -> bool:
        """Return whether this process is a rank of an MPI job; MPI is not started."""
        return find_mpi_rank() is not None

    @property
    def meeting(self) -> MPIRendezvous:
        """Where and as whom the ranks have met.

        Ranks: the first access must happen on every rank alike; it starts MPI where mpi4py is installed.
        """
        rank = self.mpi_rank
        return meet(rank.rank, rank.size, rank.local_rank, rank.local_size, rank.started_by)

    @property
    def creates_processes_externally(self) -> bool:
        """Whether somebody else has started the ranks: yes."""
        return True

    @property
    def main_address(self) -> str:
        """Address of rank 0."""
        return self.meeting.address

    @property
    def main_port(self) -> int:
        """Port at which rank 0 listens."""
        return self.meeting.port

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.mpi_rank.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the program that started the ranks has decided."""

    def global_rank(self) -> int:
        """Return the number of this rank."""
        return self.mpi_rank.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the program that started the ranks has decided."""

    def local_rank(self) -> int:
        """Return the number of this rank on its node."""
        return self.mpi_rank.local_rank

    def node_rank(self) -> int:
        """Return the number of this rank's node, on the assumption that ranks fill one node after another."""
        return self.mpi_rank.rank // max(self.mpi_rank.local_size, 1)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if the Trainer expects other ranks than there are.

        Raises:
            LaunchError: With a table of who says what.

        Ranks: every rank alike; nothing is sent.
        """
        rank = self.mpi_rank
        if num_devices * num_nodes == rank.size and num_devices == rank.local_size:
            return
        raise LaunchError(
            "The Trainer and the program that started the ranks disagree:\n\n"
            "                                 ranks   ranks on this node   nodes\n"
            f"  Trainer (devices x num_nodes)  {num_devices * num_nodes:<8}{num_devices:<21}{num_nodes}\n"
            f"  {rank.started_by:<31}{rank.size:<8}{rank.local_size:<21}"
            f"{rank.size / rank.local_size:g}\n\n"
            "Leave out devices, or make devices x num_nodes equal to the number of ranks that are started,"
            " the same"
            " number on every node."
        )
