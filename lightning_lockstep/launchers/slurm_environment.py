"""Ranks that srun has started, and jobs of Slurm in which srun was left out.

srun sets variables for each step beside those of the job. Lightning reads those of the job, which are wrong where a
step has fewer tasks than the job, or a job holds several steps at a time; here the step's are read.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import subprocess
import warnings
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from signal import Signals

from lightning_lockstep._lightning import ClusterEnvironment, SLURMEnvironment
from lightning_lockstep._tables import plain_table
from lightning_lockstep.errors import LaunchError

__all__ = ["SlurmStep", "SlurmStepEnvironment", "check_srun_is_used", "find_slurm_step", "hide_srun_hint"]

# Shells, which Lightning takes for interactive work: what is started in them is no task.
_INTERACTIVE = ("bash", "interactive")
# Ports that jobs are given: above those of services, below those that systems give to outgoing connections.
_FIRST_PORT, _PORTS = 12_000, 8_000
_ASK_SLURM = 10.0  # how long Slurm may take to give a node's address [s]


@dataclass(frozen=True)
class SlurmStep:
    """The rank that this process is in a step of a Slurm job, by the variables that srun has set.

    Attributes:
        job: Number of the job.
        step: Number of the step in it.
        restarts: How often the job was requeued.
        rank: Of this task.
        size: Number of tasks.
        local_rank: Of this task on its node.
        node: Number of this node among those of the step.
        tasks_per_node: Number of tasks on each node.
        nodes: Names of the nodes, as Slurm abbreviates them.
        cluster: Name of the Slurm cluster; two on one host number their jobs alike.
    """

    job: str
    step: str
    restarts: str
    rank: int
    size: int
    local_rank: int
    node: int
    tasks_per_node: tuple[int, ...]
    nodes: str
    cluster: str = ""

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
    """Return which task of a Slurm step this process is, or ``None`` where srun has not started it.

    Args:
        environ: Environment variables; by default those of this process.

    Ranks: any rank, alone; nothing is sent.
    """
    environ = os.environ if environ is None else environ
    size, rank = environ.get("SLURM_STEP_NUM_TASKS", ""), environ.get("SLURM_PROCID", "")
    # A batch script has the rank of a task, too, but not those of a step.
    if not size.isdigit() or not rank.isdigit() or environ.get("SLURM_JOB_NAME") in _INTERACTIVE:
        return None
    return SlurmStep(
        job=environ.get("SLURM_JOB_ID", "0"),
        step=environ.get("SLURM_STEP_ID", "0"),
        restarts=environ.get("SLURM_RESTART_COUNT", "0"),
        rank=int(rank),
        size=int(size),
        local_rank=int(environ.get("SLURM_LOCALID", "0")),
        node=int(environ.get("SLURM_NODEID", "0")),
        tasks_per_node=_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", size)),
        nodes=environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", ""),
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
    )


def _counts(listed: str) -> tuple[int, ...]:
    """Return the numbers in a list such as ``2(x3),1``."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(count)] * int(times or 1)
    return tuple(counts)


def hide_srun_hint() -> None:
    """Have Lightning not warn that srun is not used: it does so on every machine that has the command.

    :func:`check_srun_is_used` says it where it matters.
    """
    warnings.filterwarnings("ignore", message="The `srun` command is available")


def check_srun_is_used(num_nodes: int, environ: Mapping[str, str] | None = None) -> None:
    """Raise if ranks on other nodes would be waited for in a batch script that does not start them.

    Args:
        num_nodes: Number of nodes that the Trainer expects.
        environ: Environment variables; by default those of this process.

    Raises:
        LaunchError: This program runs once, on the first node of its job.
    """
    environ = os.environ if environ is None else environ
    in_script = "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" not in environ
    by_hand = "NODE_RANK" in environ or "GROUP_RANK" in environ
    if num_nodes < 2 or not in_script or by_hand or environ.get("SLURM_JOB_NAME") in _INTERACTIVE:
        return
    job, nodes = environ.get("SLURM_JOB_ID", "?"), environ.get("SLURM_JOB_NUM_NODES", "?")
    raise LaunchError(
        f"num_nodes={num_nodes}, but the batch script of Slurm job {job} ({nodes} nodes) has started this program once,"
        " on its first node, and nobody starts it on the others. Put srun in front of the command, and ask for"
        " --ntasks-per-node=<devices>."
    )


class SlurmStepEnvironment(SLURMEnvironment):
    """The cluster environment of the tasks of a Slurm step.

    Ranks meet at ``MASTER_ADDR`` and ``MASTER_PORT`` where those are set; else at the step's first node, and at a
    port of the step: one that Slurm has reserved (``srun --resv-ports``), or one computed from job and step.

    Args:
        step: The step; by default found in the environment variables.
        auto_requeue: Whether the job is requeued on ``requeue_signal``.
        requeue_signal: By default ``SIGUSR1``.

    Ranks: every rank of the step makes one.
    """

    def __init__(
        self,
        step: SlurmStep | None = None,
        *,
        auto_requeue: bool = True,
        requeue_signal: Signals | None = None,
    ) -> None:
        # Lightning's own constructor refuses --ntasks without --ntasks-per-node.
        ClusterEnvironment.__init__(self)
        self.auto_requeue = auto_requeue
        self.requeue_signal = Signals.SIGUSR1 if requeue_signal is None else requeue_signal
        found = step or find_slurm_step()
        if found is None:
            raise LaunchError("This process is no task of a Slurm step: expected it to be started by srun.")
        self.slurm_step = found

    @staticmethod
    def detect() -> bool:
        """Return whether srun has started this process as one of several tasks."""
        step = find_slurm_step()
        return step is not None and step.size > 1

    @property
    def rendezvous_name(self) -> str:
        """What all ranks of this step have in common, and no others."""
        return f"Slurm step {self.slurm_step.name}"

    @property
    def main_address(self) -> str:
        """Address of rank 0.

        Raises:
            LaunchError: Its name cannot be resolved here.
        """
        given = os.environ.get("MASTER_ADDR")
        if given:
            return _checked(given)
        if len(self.slurm_step.tasks_per_node) == 1:
            return "127.0.0.1"
        return _address_of_node(self.resolve_root_node_address(self.slurm_step.nodes))

    @property
    def main_port(self) -> int:
        """Port at which rank 0 listens."""
        given = os.environ.get("MASTER_PORT", "")
        reserved = re.match(r"\d+", os.environ.get("SLURM_STEP_RESV_PORTS", ""))
        if given.isdigit():
            return int(given)
        if reserved is not None:
            return int(reserved[0])
        return _FIRST_PORT + zlib.crc32(self.slurm_step.name.encode()) % _PORTS

    def world_size(self) -> int:
        """Return the number of tasks of the step."""
        return self.slurm_step.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: srun has decided."""

    def global_rank(self) -> int:
        """Return this rank."""
        return self.slurm_step.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: srun has decided."""

    def local_rank(self) -> int:
        """Return this rank on its node."""
        return self.slurm_step.local_rank

    def node_rank(self) -> int:
        """Return the number of this rank's node."""
        return self.slurm_step.node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if the Trainer expects other ranks than srun has started.

        Raises:
            LaunchError: With a table of what each expects, and the flags to change.
        """
        step = self.slurm_step
        counts, nodes = set(step.tasks_per_node), len(step.tasks_per_node)
        if counts == {num_devices} and nodes == num_nodes:
            return
        given = "+".join(map(str, step.tasks_per_node)) if len(counts) > 1 else str(step.local_size)
        table = plain_table(
            ("", "tasks", "tasks per node", "nodes"),
            [
                ("Trainer (devices x num_nodes)", num_devices * num_nodes, num_devices, num_nodes),
                ("srun", step.size, given, nodes),
            ],
        )
        raise LaunchError(
            f"The Trainer and srun disagree about the ranks:\n\n{table}\n\n"
            f"{_what_to_change(step, num_devices, num_nodes)}"
        )


def _what_to_change(step: SlurmStep, num_devices: int, num_nodes: int) -> str:
    counts, nodes = set(step.tasks_per_node), len(step.tasks_per_node)
    on_slurm = f"--nodes={num_nodes} --ntasks-per-node={num_devices}"
    if len(counts) > 1:
        return (
            f"Every node needs the same number of tasks: ask Slurm for {on_slurm} instead of --ntasks"
            f"={step.size} alone."
        )
    return (
        f"Set devices={step.local_size} and num_nodes={nodes} in the Trainer"
        f" (trainer.devices={step.local_size} trainer.num_nodes={nodes}), or ask Slurm for {on_slurm}."
    )


@functools.cache
def _checked(given: str) -> str:
    """Return the ``MASTER_ADDR`` that was given if it can be resolved: the names of a cluster do not come later."""
    try:
        socket.getaddrinfo(given, None)
    except OSError as error:
        raise LaunchError(
            f"MASTER_ADDR={given!r} cannot be resolved on {socket.gethostname()!r}: expected the name or address of the"
            " step's first node. Correct it, or leave it out: the ranks then ask Slurm."
        ) from error
    return given


@functools.cache
def _address_of_node(name: str) -> str:
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
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(
            [scontrol, "show", "node", "--oneliner", name],
            capture_output=True,
            text=True,
            timeout=_ASK_SLURM,
            check=True,
        )
        found = re.search(r"\bNodeAddr=(\S+)", told.stdout)
        return found[1] if found else None
    return None
