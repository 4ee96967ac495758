"""Which rank this process is, told from the environment variables of MPI and Slurm alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StartedRank:
    """The rank that this process is, by the environment variables of the program that started it."""

    started_by: str  # ``srun``, or such as ``Open MPI's mpirun``
    rank: int
    size: int
    local_rank: int
    local_size: int  # number of ranks on this node
    node: int  # its number among those of the job or step
    per_node: tuple[int, ...]  # number of ranks on each node
    # A name that no other step has: of other jobs and clusters, and of earlier runs of this job. None: started by MPI.
    step: str | None = None
    nodes: str = ""  # of a step, as Slurm abbreviates their names, such as ``node[5-9,12]``

    @property
    def layout(self) -> tuple[str, str]:
        """The ranks per node, `2+1` if they differ, and the number of nodes."""
        each = "+".join(map(str, self.per_node)) if len(set(self.per_node)) > 1 else str(self.local_size)
        return each, str(len(self.per_node))


# -- Which task of a Slurm step this process is --

#: Names of jobs that Lightning takes for interactive work: a process in them is no task.
INTERACTIVE = ("bash", "interactive")


def find_slurm_step(environ: Mapping[str, str] = os.environ) -> StartedRank | None:
    """Return which task of a Slurm step this process is, or ``None`` if srun has not started it."""
    size, rank = environ.get("SLURM_STEP_NUM_TASKS", ""), environ.get("SLURM_PROCID", "")
    # A batch script has a rank too, but not the number of tasks of a step.
    if not size.isdecimal() or not rank.isdecimal() or environ.get("SLURM_JOB_NAME") in INTERACTIVE:
        return None
    job, step, restarts = (environ.get(f"SLURM_{key}", "0") for key in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    node = int(environ.get("SLURM_NODEID", 0))
    per_node = counts_in(environ.get("SLURM_STEP_TASKS_PER_NODE", size))
    return StartedRank(
        "srun",
        rank=int(rank),
        size=int(size),
        local_rank=int(environ.get("SLURM_LOCALID", 0)),
        local_size=per_node[node] if node < len(per_node) else int(size),
        node=node,
        per_node=per_node,
        step=f"{job}.{step}.{restarts}@{environ.get('SLURM_CLUSTER_NAME', '')}",
        nodes=environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", ""),
    )


def slurm_job(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of this process's job as commands of Slurm take it; empty outside one."""
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


def started_from_outside() -> bool:
    """Return whether this process may be one of several that another program has started."""
    return any(name in os.environ for name in _FROM_OUTSIDE)


def find_mpi_rank(environ: Mapping[str, str] = os.environ) -> StartedRank | None:
    """Return the rank that this process is in an MPI job, or ``None`` when it is not part of one."""
    session = environ.get("PMIX_SERVER_TMPDIR") or environ.get("OMPI_FILE_LOCATION") or "none"
    has_session = Path(session).exists()
    open_mpi = _numbered("Open MPI's mpirun", environ, "OMPI_COMM_WORLD_{}") if has_session else None
    mvapich = _numbered("MVAPICH's mpirun", environ, "MV2_COMM_WORLD_{}")
    return open_mpi or mvapich or _task_of_mpi(environ) or _mpich(environ)


def _task_of_mpi(environ: Mapping[str, str]) -> StartedRank | None:
    step = find_slurm_step(environ)
    by_mpi = any(name.startswith(("PMI_", "PMI2_", "PMIX_")) for name in environ)
    if step is None or step.size < 2 or not by_mpi:
        return None
    # Another size is that of an mpiexec whose daemons srun has started.
    return step if environ.get("PMI_SIZE", str(step.size)) == str(step.size) else None


def _mpich(environ: Mapping[str, str]) -> StartedRank | None:
    is_open = Path("/proc/self/fd", environ.get("PMI_FD") or "none").exists()
    if not (is_open or "PMI_PORT" in environ):
        return None
    # An mpiexec that gives no local numbers starts all ranks on one host.
    local = {"MPI_LOCALRANKID": environ.get("PMI_RANK", ""), "MPI_LOCALNRANKS": environ.get("PMI_SIZE", "")}
    return _numbered("mpiexec", {**local, **environ}, "{}", ("PMI_RANK", "PMI_SIZE", *local))


def _numbered(
    started_by: str,
    environ: Mapping[str, str],
    pattern: str,
    names: Sequence[str] = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
) -> StartedRank | None:
    values = [environ.get(pattern.format(name), "") for name in names]
    if not all(value.isdecimal() for value in values):
        return None
    rank, size, local_rank, local_size = map(int, values)
    # Ranks are taken to fill one node after another, each with as many as this one.
    each = max(local_size, 1)
    per_node = tuple(min(each, size - first) for first in range(0, size, each))
    return StartedRank(started_by, rank, size, local_rank, local_size, rank // each, per_node)
