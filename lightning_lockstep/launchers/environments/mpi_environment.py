"""The cluster environments of ranks that mpirun, mpiexec or srun has started."""

from __future__ import annotations

from dataclasses import asdict

from lightning_lockstep._lightning import ClusterEnvironment
from lightning_lockstep._tables import plain_table
from lightning_lockstep.distributed.mpi.rendezvous import MPIRendezvous, agree_on_rendezvous
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.environments.mpi_rank import RANK_VARIABLES, SRUN, MPIRank, find_mpi_rank
from lightning_lockstep.launchers.environments.slurm_environment import SlurmStepEnvironment

__all__ = ["RANK_VARIABLES", "SRUN", "MPIEnvironment", "MPIRank", "SrunMPIEnvironment", "find_mpi_rank"]


class MPIEnvironment(ClusterEnvironment):
    """The cluster environment of ranks of an MPI job.

    The rendezvous is agreed on over MPI itself when first asked for, so no port is fixed and several jobs on a
    host do not collide.
    """

    def __init__(self, rank: MPIRank | None = None) -> None:
        super().__init__()
        found = rank or find_mpi_rank()
        if found is None:
            raise LaunchError(
                "This process is no rank of an MPI job: expected it to be started by mpirun, mpiexec or srun --mpi=..."
            )
        self.mpi_rank = found

    @staticmethod
    def detect() -> bool:
        """Return whether this process is a rank of an MPI job; MPI is not started."""
        return find_mpi_rank() is not None

    @property
    def rendezvous(self) -> MPIRendezvous:
        # The first access must happen on every rank alike: it starts MPI where mpi4py is installed.
        return agree_on_rendezvous(**asdict(self.mpi_rank))

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.rendezvous.address

    @property
    def main_port(self) -> int:
        return self.rendezvous.port

    def world_size(self) -> int:
        return self.mpi_rank.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the program that started the ranks has decided."""

    def global_rank(self) -> int:
        return self.mpi_rank.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the program that started the ranks has decided."""

    def local_rank(self) -> int:
        return self.mpi_rank.local_rank

    def node_rank(self) -> int:
        """Return the number of this rank's node, on the assumption that ranks fill one node after another."""
        return self.mpi_rank.rank // max(self.mpi_rank.local_size, 1)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if the Trainer expects other ranks than there are."""
        rank = self.mpi_rank
        if num_devices * num_nodes == rank.size and num_devices == rank.local_size:
            return
        table = plain_table(
            ("", "ranks", "ranks on this node", "nodes"),
            [
                ("Trainer (devices x num_nodes)", num_devices * num_nodes, num_devices, num_nodes),
                (rank.started_by, rank.size, rank.local_size, f"{rank.size / rank.local_size:g}"),
            ],
        )
        raise LaunchError(
            f"The Trainer and the program that started the ranks disagree:\n\n{table}\n\n"
            "Leave out devices, or make devices x num_nodes equal to the number of ranks that are started, the"
            " same number on every node."
        )


class SrunMPIEnvironment(MPIEnvironment, SlurmStepEnvironment):
    """The cluster environment of ranks of an MPI job that srun has started: Slurm requeues it as it does others."""
