"""Who started the ranks, read from environment variables only.

Lightning tries several cluster environments in turn, and its MPI one starts MPI merely to look whether it is
there: a second lost wherever mpi4py is installed, and a hang on clusters that allow MPI only under their own
launcher. A strategy of ours that is given as an object has its environment already, so Lightning does not look.
"""

from __future__ import annotations

import os

from lightning_lockstep._lightning import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning_lockstep.launchers.mpi_environment import MPIEnvironment

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


def detect_environment() -> ClusterEnvironment:
    """Return the cluster environment of this process, without starting or importing MPI.

    Ranks: any rank, alone; reads environment variables.
    """
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if MPIEnvironment.detect():
        return MPIEnvironment()
    if SLURMEnvironment.detect() and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        return SLURMEnvironment()
    if LSFEnvironment.detect():
        return LSFEnvironment()
    return LockstepEnvironment()
