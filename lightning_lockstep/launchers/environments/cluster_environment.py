"""Who started the ranks, read from environment variables only.

Lightning tries several cluster environments in turn, and its MPI one starts MPI merely to look whether it is
there: a second lost wherever mpi4py is installed, and a hang on clusters that allow MPI only under their own
launcher. A strategy of ours that is given as an object has its environment already, so Lightning does not look.
"""

from __future__ import annotations

from signal import SIGUSR1, Signals

from lightning_lockstep._lightning import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.environments.mpi_environment import (
    SRUN,
    MPIEnvironment,
    SrunMPIEnvironment,
    find_mpi_rank,
)
from lightning_lockstep.launchers.environments.slurm_environment import SlurmStepEnvironment, find_slurm_step

__all__ = [
    "LockstepEnvironment",
    "belongs_to_slurm",
    "check_has_device",
    "detect_environment",
    "requeue_signal",
]


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


def belongs_to_slurm(environment: ClusterEnvironment) -> bool:
    """Return whether Slurm has started this rank, or the program that has started it as the one task of a step."""
    is_own = isinstance(environment, LockstepEnvironment) and find_slurm_step() is not None
    return is_own or isinstance(environment, SLURMEnvironment)


def requeue_signal(environment: ClusterEnvironment) -> Signals | None:
    """Return the signal on which the Slurm job is requeued, or ``None`` where it is not."""
    if isinstance(environment, SLURMEnvironment):
        return Signals(environment.requeue_signal or SIGUSR1) if environment.auto_requeue else None
    return SIGUSR1 if belongs_to_slurm(environment) else None


def check_has_device(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> None:
    """Raise if more ranks were started on this node than the Trainer has devices for."""
    if not environment.creates_processes_externally or environment.local_rank() < num_devices:
        return
    environment.validate_settings(num_devices=num_devices, num_nodes=num_nodes)
    raise LaunchError(
        f"devices={num_devices}, but at least {environment.local_rank() + 1} ranks were started on this node: expected"
        " as many devices as ranks. Set devices in the Trainer to the number of ranks of a node, or start fewer."
    )
