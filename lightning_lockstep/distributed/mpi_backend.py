"""The old place of :mod:`lightning_lockstep.distributed.mpi.backend`, kept for one release."""

from lightning_lockstep.distributed.mpi.backend import (
    MPIBackendOptions,
    default_options,
    register_mpi_backend,
)

__all__ = ["MPIBackendOptions", "default_options", "register_mpi_backend"]
