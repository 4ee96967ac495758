"""Ranks that mpirun, mpiexec or srun has started, recognised by environment variables alone.

=============== ====================================== =======================================
started by      rank and size                          the job is running if
=============== ====================================== =======================================
Open MPI        ``OMPI_COMM_WORLD_RANK``, ``_SIZE``    its session folder is there
MVAPICH         ``MV2_COMM_WORLD_RANK``, ``_SIZE``     (always)
Slurm           ``SLURM_PROCID``, ``SLURM_STEP_...``   there are ``PMI_*`` or ``PMIX_*`` too
MPICH, Intel    ``PMI_RANK``, ``PMI_SIZE``             the descriptor ``PMI_FD`` is open
=============== ====================================== =======================================

A shell that was started inside a job, or an `export` left behind, has such variables without being a rank: hence
the last column. mpi4py is not imported here: that would start MPI.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_lockstep.launchers.environments.slurm_step import find_slurm_step

__all__ = ["RANK_VARIABLES", "SRUN", "MPIRank", "find_mpi_rank"]

#: Each rank that an mpirun or mpiexec has started has one of these.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")
#: What :attr:`MPIRank.started_by` is for ranks of a Slurm step.
SRUN = "srun"


@dataclass(frozen=True)
class MPIRank:
    """The rank that this process is, by the environment variables of the program that started it."""

    started_by: str  # such as ``Open MPI's mpirun``
    rank: int
    size: int
    local_rank: int
    local_size: int


def find_mpi_rank(environ: Mapping[str, str] | None = None) -> MPIRank | None:
    """Return the rank that this process is in an MPI job, or ``None`` when it is not part of one."""
    environ = os.environ if environ is None else environ
    return _open_mpi(environ) or _mvapich(environ) or _slurm(environ) or _hydra(environ)


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
    step = find_slurm_step(environ)
    by_mpi = any(name.startswith(("PMI_", "PMI2_", "PMIX_")) for name in environ)
    if step is None or step.size < 2 or not by_mpi:
        return None
    if environ.get("PMI_SIZE", str(step.size)) != str(step.size):
        return None  # srun has started the daemons of an mpiexec
    return MPIRank(SRUN, step.rank, step.size, step.local_rank, step.local_size)


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
    return [int(value) for value in values] if all(value.isdecimal() for value in values) else None
