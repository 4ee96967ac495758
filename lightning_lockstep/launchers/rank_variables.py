"""Which rank this process is, told from the environment variables of MPI and Slurm alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# -- Which task of a Slurm step this process is --

#: Names of jobs that Lightning takes for interactive work: a process in them is no task.
INTERACTIVE = ("bash", "interactive")


@dataclass(frozen=True)
class SlurmStep:
    """The rank that this process is in a step of a Slurm job, by the variables that srun has set."""

    name: str  # differs from that of each other step: of other jobs and clusters, and of earlier runs of this job
    rank: int
    size: int
    local_rank: int
    node: int  # its number among those of the step
    tasks_per_node: tuple[int, ...]
    nodes: str  # as Slurm abbreviates their names, such as ``node[5-9,12]``
    started_by = "srun"

    @property
    def layout(self) -> tuple[str, str]:
        """The ranks per node, `2+1` if they differ, and the number of nodes."""
        counts = self.tasks_per_node
        each = "+".join(map(str, counts)) if len(set(counts)) > 1 else str(self.local_size)
        return each, str(len(counts))

    @property
    def local_size(self) -> int:
        """Number of tasks on this node."""
        return self.tasks_per_node[self.node] if self.node < len(self.tasks_per_node) else self.size


def find_slurm_step(environ: Mapping[str, str] | None = None) -> SlurmStep | None:
    """Return which task of a Slurm step this process is, or ``None`` if srun has not started it."""
    environ = os.environ if environ is None else environ
    size, rank = environ.get("SLURM_STEP_NUM_TASKS", ""), environ.get("SLURM_PROCID", "")
    # A batch script has a rank too, but not the number of tasks of a step.
    if not size.isdecimal() or not rank.isdecimal() or environ.get("SLURM_JOB_NAME") in INTERACTIVE:
        return None
    job, step, restarts = (environ.get(f"SLURM_{key}", "0") for key in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    return SlurmStep(
        name=f"{job}.{step}.{restarts}@{environ.get('SLURM_CLUSTER_NAME', '')}",
        rank=int(rank),
        size=int(size),
        local_rank=int(environ.get("SLURM_LOCALID", 0)),
        node=int(environ.get("SLURM_NODEID", 0)),
        tasks_per_node=counts_in(environ.get("SLURM_STEP_TASKS_PER_NODE", size)),
        nodes=environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", ""),
    )


def slurm_job(environ: Mapping[str, str] | None = None) -> str:
    """Return the name of this process's job as commands of Slurm take it; empty outside of one."""
    environ = os.environ if environ is None else environ
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID", "")
    return environ.get("SLURM_JOB_ID", "") if array is None else f"{array}_{task}"


def counts_in(listed: str) -> tuple[int, ...]:
    """Return the numbers in a list such as ``2(x3),1``, as ``SLURM_TASKS_PER_NODE`` has it."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(count)] * int(times or 1)
    return tuple(counts)


# -- Ranks that mpirun, mpiexec or srun has started, recognised by environment variables alone --
# =============== ====================================== =======================================
# started by      rank and size                          the job is running if
# =============== ====================================== =======================================
# Open MPI        ``OMPI_COMM_WORLD_RANK``, ``_SIZE``    its session folder is there
# MVAPICH         ``MV2_COMM_WORLD_RANK``, ``_SIZE``     (always)
# Slurm           ``SLURM_PROCID``, ``SLURM_STEP_...``   there are ``PMI_*`` or ``PMIX_*`` too
# MPICH, Intel    ``PMI_RANK``, ``PMI_SIZE``             the descriptor ``PMI_FD`` is open
# =============== ====================================== =======================================
#
# A shell that was started inside a job, or an `export` left behind, has such variables without being a rank; the last
# column tells it from a rank. mpi4py is not imported here, because that would start MPI.

#: Each rank that another program has started has one of these: from torchrun, srun, jsrun, a user by hand, or an MPI.
_FROM_OUTSIDE = (
    "TORCHELASTIC_RUN_ID",
    "LOCAL_RANK",
    "NODE_RANK",
    "SLURM_PROCID",
    "LSB_JOBID",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMI_RANK",
)


@dataclass(frozen=True)
class MPIRank:
    """The rank that this process is, by the environment variables of the program that started it."""

    started_by: str  # such as ``Open MPI's mpirun``
    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def node(self) -> int:
        """The number of this rank's node, on the assumption that ranks fill one node after another."""
        return self.rank // max(self.local_size, 1)

    @property
    def layout(self) -> tuple[str, str]:
        """The ranks per node and the number of nodes, if all nodes have as many as this one."""
        return str(self.local_size), f"{self.size / self.local_size:g}"


def started_from_outside() -> bool:
    """Return whether this process may be one of several that another program has started."""
    return any(name in os.environ for name in _FROM_OUTSIDE)


def find_mpi_rank(environ: Mapping[str, str] | None = None) -> MPIRank | SlurmStep | None:
    """Return the rank that this process is in an MPI job, or ``None`` when it is not part of one."""
    environ = os.environ if environ is None else environ
    return _open_mpi(environ) or _mvapich(environ) or _slurm(environ) or _hydra(environ)


def _open_mpi(environ: Mapping[str, str]) -> MPIRank | None:
    numbers = _numbers(environ, "OMPI_COMM_WORLD_{}", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    session = environ.get("PMIX_SERVER_TMPDIR") or environ.get("OMPI_FILE_LOCATION")
    if numbers is None or not session or not Path(session).exists():
        return None
    return MPIRank("Open MPI's mpirun", *numbers)


def _mvapich(environ: Mapping[str, str]) -> MPIRank | None:
    numbers = _numbers(environ, "MV2_COMM_WORLD_{}", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return MPIRank("MVAPICH's mpirun", *numbers) if numbers else None


def _slurm(environ: Mapping[str, str]) -> SlurmStep | None:
    step = find_slurm_step(environ)
    by_mpi = any(name.startswith(("PMI_", "PMI2_", "PMIX_")) for name in environ)
    if step is None or step.size < 2 or not by_mpi:
        return None
    # Another size is that of an mpiexec whose daemons srun has started.
    return step if environ.get("PMI_SIZE", str(step.size)) == str(step.size) else None


def _hydra(environ: Mapping[str, str]) -> MPIRank | None:
    numbers = _numbers(environ, "PMI_{}", ("RANK", "SIZE"))
    is_open = Path("/proc/self/fd", environ.get("PMI_FD") or "none").exists()
    if numbers is None or not (is_open or "PMI_PORT" in environ):
        return None
    local = _numbers(environ, "MPI_{}", ("LOCALRANKID", "LOCALNRANKS")) or numbers
    return MPIRank("mpiexec", *numbers, *local)


def _numbers(environ: Mapping[str, str], pattern: str, names: tuple[str, ...]) -> list[int] | None:
    values = [environ.get(pattern.format(name), "") for name in names]
    return [int(value) for value in values] if all(value.isdecimal() for value in values) else None
