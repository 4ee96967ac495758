"""Which task of a Slurm step this process is, by the variables that srun sets for each step; imports no torch."""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from lightning_lockstep._processes import run_program
from lightning_lockstep.errors import LaunchError

__all__ = ["INTERACTIVE", "SlurmStep", "address_of_node", "counts_in", "find_slurm_step", "first_node"]

#: Shells, which Lightning takes for interactive work: what is started in them is no task.
INTERACTIVE = ("bash", "interactive")
_ASK_SLURM = 10.0  # how long Slurm may take to give a node's address [s]


@dataclass(frozen=True)
class SlurmStep:
    """The rank that this process is in a step of a Slurm job, by the variables that srun has set."""

    job: str
    step: str
    restarts: str  # how often the job was requeued
    rank: int
    size: int
    local_rank: int
    node: int  # its number among those of the step
    tasks_per_node: tuple[int, ...]
    nodes: str  # as Slurm abbreviates their names, such as ``node[5-9,12]``
    cluster: str = ""  # two clusters on one host number their jobs alike

    @property
    def local_size(self) -> int:
        """Number of tasks on this node."""
        return self.tasks_per_node[self.node] if self.node < len(self.tasks_per_node) else self.size

    @property
    def name(self) -> str:
        """What tells this step from every other, of other jobs and of earlier runs of this job too."""
        step = f"{self.job}.{self.step}.{self.restarts}"
        return f"{step}@{self.cluster}" if self.cluster else step


def find_slurm_step(environ: Mapping[str, str] | None = None) -> SlurmStep | None:
    """Return which task of a Slurm step this process is, or ``None`` where srun has not started it."""
    environ = os.environ if environ is None else environ
    size, rank = environ.get("SLURM_STEP_NUM_TASKS", ""), environ.get("SLURM_PROCID", "")
    # A batch script has the rank of a task, too, but not those of a step.
    if not size.isdecimal() or not rank.isdecimal() or environ.get("SLURM_JOB_NAME") in INTERACTIVE:
        return None
    return SlurmStep(
        job=environ.get("SLURM_JOB_ID", "0"),
        step=environ.get("SLURM_STEP_ID", "0"),
        restarts=environ.get("SLURM_RESTART_COUNT", "0"),
        rank=int(rank),
        size=int(size),
        local_rank=_number(environ.get("SLURM_LOCALID", "0")),
        node=_number(environ.get("SLURM_NODEID", "0")),
        tasks_per_node=counts_in(environ.get("SLURM_STEP_TASKS_PER_NODE", size)),
        nodes=environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", ""),
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def counts_in(listed: str) -> tuple[int, ...]:
    """Return the numbers in a list such as ``2(x3),1``, as ``SLURM_TASKS_PER_NODE`` has it."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(count)] * int(times or 1)
    return tuple(counts)


def first_node(nodes: str) -> str:
    """Return the first of several nodes: ``node[5-9,12]``, ``node1,node2`` or ``node1 node2``."""
    first = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes)
    return first.split(" ")[0].split(",")[0]


@functools.cache
def address_of_node(name: str) -> str:
    """Return the name of a node if it can be resolved, else the address that Slurm knows it by."""
    for address in (name, _address_by_slurm(name)):
        if address:
            with suppress(OSError):
                socket.getaddrinfo(address, None)
                return address
    raise LaunchError(
        f"Slurm names {name!r} as the node of rank 0, and {socket.gethostname()!r} cannot resolve that name. Put an"
        " address of that node in front of srun: export MASTER_ADDR=..."
    )


def _address_by_slurm(name: str) -> str | None:
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return None
    answer = run_program([scontrol, "show", "node", "--oneliner", name], _ASK_SLURM)
    found = re.search(r"\bNodeAddr=(\S+)", answer.output) if answer.succeeded else None
    return found[1] if found else None
