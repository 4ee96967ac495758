"""Who started the ranks, read from environment variables only.

Lightning tries several cluster environments in turn, and its MPI one starts MPI merely to look whether it is
there: a second lost wherever mpi4py is installed, and a hang on clusters that allow MPI only under their own
launcher. A strategy of ours that is given as an object has its environment already, so Lightning does not look.
"""

from __future__ import annotations

from lightning_lockstep._lightning import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    TorchElasticEnvironment,
)
from lightning_lockstep.launchers.mpi_environment import (
    SRUN,
    MPIEnvironment,
    SrunMPIEnvironment,
    find_mpi_rank,
)
from lightning_lockstep.launchers.slurm_environment import SlurmStepEnvironment

__all__ = ["LockstepEnvironment", "detect_environment"]


class LockstepEnvironment(LightningEnvironment):
    """The environment of ranks that we start ourselves, or that the user starts by hand on each node.

    The port at which ranks meet is chosen when they are started, not taken from a variable that an earlier job
    of the same process may have left behind.
    """

    def adopt_port(self, port: int) -> None:
        """Use ``port`` for the rendezvous; the launcher calls this once it listens there."""
        self._main_port = port

    def teardown(self) -> None:
        """Leave the environment variables alone; the launcher that set them puts them back."""


def detect_environment(*, mpi: bool = False) -> ClusterEnvironment:
    """Return the cluster environment of this process, without starting or importing MPI.

    Args:
        mpi: Whether ranks that srun has started with an MPI type (``--mpi=pmi2``, ``pmix``) are to be ranks of an MPI
            job. On many clusters every srun does so, and without mpi4py they are none.

    Ranks: any rank, alone; reads environment variables.
    """
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    rank = find_mpi_rank()
    if rank is not None and (mpi or rank.started_by != SRUN):
        return SrunMPIEnvironment(rank) if rank.started_by == SRUN else MPIEnvironment(rank)
    if SlurmStepEnvironment.detect():
        return SlurmStepEnvironment()
    if LSFEnvironment.detect():
        return LSFEnvironment()
    return LockstepEnvironment()
