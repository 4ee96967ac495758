"""Which rank this process is, of ranks that torchrun, mpirun or srun has started, and where rank 0 is found."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from lightning_lockstep.distributed.interfaces import on_one_host
from lightning_lockstep.distributed.side_channel.job_token import known_job_token
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.environments.mpi_rank import SRUN, find_mpi_rank
from lightning_lockstep.launchers.environments.slurm_step import address_of_node, find_slurm_step, first_node

__all__ = ["JoinedRank", "joined_rank"]

_JOB_NAMES = (
    *(
        "TORCHELASTIC_RUN_ID",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_CLUSTER_NAME",
    ),
    *("PMIX_NAMESPACE", "PMI_JOBID", "OMPI_MCA_ess_base_jobid"),
)
_FIRST_PORT, _PORTS, _TRIES = 20_000, 11_000, 4


@dataclass(frozen=True)
class JoinedRank:
    """A rank that another program has started."""

    started_by: str
    rank: int
    size: int
    local_rank: int
    address: str | None  # of rank 0, by the environment variables; None where they do not say
    by_mpi: bool = False  # it is a rank of an MPI job

    @property
    def ports(self) -> list[int]:
        """Where rank 0 may listen: the same on all ranks of a job, and others for another job."""
        first = zlib.crc32(f"doctor\0{_job()}".encode()) % _PORTS
        return [_FIRST_PORT + (first + 977 * number) % _PORTS for number in range(_TRIES)]

    @property
    def token(self) -> str:
        """What both ends of a connection prove to know: derived from the job's token, or without one from its name."""
        return hashlib.sha256(f"doctor\0{known_job_token() or _job()}".encode()).hexdigest()


def _job() -> str:
    return "\0".join(os.environ.get(name, "") for name in _JOB_NAMES)


def _address_of(node: str) -> str:
    with suppress(LaunchError):
        return address_of_node(node)
    return node  # what cannot be resolved is reported where it is used


def joined_rank(environ: Mapping[str, str] | None = None) -> JoinedRank | None:
    """Return the rank that this process is, or ``None`` where it was started alone."""
    environ = os.environ if environ is None else environ
    given = environ.get("MASTER_ADDR")
    if "TORCHELASTIC_RUN_ID" in environ:
        numbers = [environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        if all(number.isdecimal() for number in numbers):
            address = "127.0.0.1" if on_one_host() else given
            rank, size, local_rank = map(int, numbers)
            return JoinedRank("torchrun", rank, size, local_rank, address)
    by_mpi, step = find_mpi_rank(environ), find_slurm_step(environ)
    if by_mpi is not None and by_mpi.started_by != SRUN:
        address = "127.0.0.1" if by_mpi.local_size == by_mpi.size else given
        return JoinedRank(by_mpi.started_by, by_mpi.rank, by_mpi.size, by_mpi.local_rank, address, True)
    if step is not None:
        one = len(step.tasks_per_node) == 1
        address = given or ("127.0.0.1" if one else _address_of(first_node(step.nodes)))
        return JoinedRank(SRUN, step.rank, step.size, step.local_rank, address, by_mpi is not None)
    return None
