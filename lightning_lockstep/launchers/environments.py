"""Lightning's cluster environments for ranks that Slurm, MPI or torchrun started, and which of them this is."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from signal import SIGUSR1, Signals

from lightning_lockstep._lightning import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning_lockstep._settings import HAS_MET, launcher_pid
from lightning_lockstep._text import plain_table, say
from lightning_lockstep.distributed.failure.process_exit import end_now
from lightning_lockstep.distributed.mpi.runtime import MPIRendezvous, agree_on_rendezvous
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.rank_variables import (
    INTERACTIVE,
    SRUN,
    MPIRank,
    SlurmStep,
    address_of_node,
    find_mpi_rank,
    find_slurm_step,
    first_node,
)

# -- Ranks that another program has started --


class _StartedOutside(ClusterEnvironment):
    """The cluster environment of ranks whose numbers the program that started them has decided."""

    _here: MPIRank | SlurmStep

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._here.size

    def set_world_size(self, size: int) -> None:
        """Do nothing."""

    def global_rank(self) -> int:
        return self._here.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing."""

    def local_rank(self) -> int:
        return self._here.local_rank


# -- Ranks that srun has started, and jobs of Slurm in which srun was left out --
# srun sets variables for each step in addition to those of the job. Lightning reads those of the job, which are
# wrong where a step has fewer tasks than the job, or a job holds several steps at a time; here the step's
# are read.

# Ports that jobs are given: above those of services, below those that systems give to outgoing connections.
_FIRST_PORT, _PORTS = 12_000, 8_000


def hide_srun_hint() -> None:
    """Have Lightning not warn that srun is not used: it does so on every machine that has the command."""
    # :func:`check_srun_is_used` says it where it matters.
    warnings.filterwarnings("ignore", message="The `srun` command is available")


def check_srun_is_used(num_nodes: int, environ: Mapping[str, str] | None = None) -> None:
    """Raise if ranks on other nodes would be waited for in a batch script that does not start them."""
    # Where none are waited for, a line says that the job's other nodes are not used.
    environ = os.environ if environ is None else environ
    in_script = "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" not in environ
    by_hand = "NODE_RANK" in environ or "GROUP_RANK" in environ
    if not in_script or by_hand or environ.get("SLURM_JOB_NAME") in INTERACTIVE:
        return
    job, nodes = environ.get("SLURM_JOB_ID", "?"), environ.get("SLURM_JOB_NUM_NODES", "?")
    if num_nodes < 2:
        if nodes.isdigit() and int(nodes) > 1 and "LOCAL_RANK" not in environ:
            say(
                f"lightning-lockstep: Slurm job {job} has {nodes} nodes, but its batch script has started this program"
                " once, without srun, so it runs on this node alone. To use all of them put srun in front of the"
                f" command, and ask for --ntasks-per-node=<devices> and num_nodes={nodes}."
            )
        return
    raise LaunchError(
        f"num_nodes={num_nodes}, but the batch script of Slurm job {job} ({nodes} nodes) has started this program once,"
        " on its first node, and nothing starts it on the others. Put srun in front of the command, and ask for"
        " --ntasks-per-node=<devices>."
    )


class SlurmStepEnvironment(_StartedOutside, SLURMEnvironment):
    """The cluster environment of the tasks of a Slurm step."""

    # Ranks meet at ``MASTER_ADDR`` and ``MASTER_PORT`` where those are set; else at the step's first node,
    # and at a port of the step: one that Slurm has reserved (``srun --resv-ports``), or one computed from job
    # and step.

    def __init__(self, step: SlurmStep | None = None) -> None:
        found = step or find_slurm_step()
        if found is None:
            raise LaunchError(
                "This process is not a task of a Slurm step: expected it to be started by srun."
            )
        # Lightning's own constructor refuses --ntasks without --ntasks-per-node.
        ClusterEnvironment.__init__(self)
        self.auto_requeue, self.requeue_signal = True, Signals.SIGUSR1
        self._here = self.slurm_step = found

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
        """Address of rank 0; a `LaunchError` where its name cannot be resolved here."""
        given = os.environ.get("MASTER_ADDR")
        if given:
            return _checked(given)
        if len(self.slurm_step.tasks_per_node) == 1:
            return "127.0.0.1"
        return address_of_node(first_node(self.slurm_step.nodes))

    @property
    def main_port(self) -> int:
        given = os.environ.get("MASTER_PORT", "")
        reserved = re.match(r"\d+", os.environ.get("SLURM_STEP_RESV_PORTS", ""))
        if given.isdigit():
            return int(given)
        if reserved is not None:
            return int(reserved[0])
        return _FIRST_PORT + zlib.crc32(self.slurm_step.name.encode()) % _PORTS

    def node_rank(self) -> int:
        return self.slurm_step.node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if the Trainer expects other ranks than srun has started."""
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


# -- The cluster environments of ranks that mpirun, mpiexec or srun has started --


class MPIEnvironment(_StartedOutside):
    """The cluster environment of ranks of an MPI job."""

    # The rendezvous is agreed on over MPI itself when first asked for, so no port is fixed and several jobs
    # on a host do not collide.

    def __init__(self, rank: MPIRank | None = None) -> None:
        super().__init__()
        found = rank or find_mpi_rank()
        if found is None:
            raise LaunchError(
                "This process is not a rank of an MPI job: expected it to be started by mpirun, mpiexec or"
                " srun --mpi=..."
            )
        self._here = self.mpi_rank = found

    @staticmethod
    def detect() -> bool:
        """Return whether this process is a rank of an MPI job; MPI is not started."""
        return find_mpi_rank() is not None

    @property
    def rendezvous(self) -> MPIRendezvous:
        # The first access must happen on every rank: it starts MPI where mpi4py is installed.
        return agree_on_rendezvous(**asdict(self.mpi_rank))

    @property
    def main_address(self) -> str:
        return self.rendezvous.address

    @property
    def main_port(self) -> int:
        return self.rendezvous.port

    def node_rank(self) -> int:
        """Return the number of this rank's node, on the assumption that ranks fill one node after another."""
        return self.mpi_rank.rank // max(self.mpi_rank.local_size, 1)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if the Trainer expects other ranks than there are."""
        rank = self.mpi_rank
        if num_devices * num_nodes == rank.size and num_devices == rank.local_size:
            return
        table = plain_table(
            ("", "ranks", "ranks on this node", "nodes"),
            [
                ("Trainer (devices x num_nodes)", num_devices * num_nodes, num_devices, num_nodes),
                (rank.started_by, rank.size, rank.local_size, f"{rank.size / rank.local_size:g}"),
            ],
        )
        raise LaunchError(
            f"The Trainer and the program that started the ranks disagree:\n\n{table}\n\n"
            "Leave out devices, or make devices x num_nodes equal to the number of ranks that are started, the"
            " same number on every node."
        )


class SrunMPIEnvironment(MPIEnvironment, SlurmStepEnvironment):
    """The cluster environment of ranks of an MPI job that srun has started: Slurm requeues it as it does others."""


# -- Who started the ranks, read from environment variables only --
# Lightning tries several cluster environments in turn, and its MPI one starts MPI merely to look whether it
# is there: a second lost wherever mpi4py is installed, and a hang on clusters that allow MPI only under
# their own launcher. A strategy of ours that is given as an object has its environment already, so
# Lightning does not look.


class LockstepEnvironment(LightningEnvironment):
    """The environment of ranks that we start ourselves, or that the user starts by hand on each node."""

    # The port at which ranks meet is chosen when they are started, not taken from a variable that an earlier
    # job of the same process may have left behind.

    def adopt_port(self, port: int) -> None:
        """Use ``port`` for the rendezvous; the launcher calls this once it listens there."""
        self._main_port = port

    def teardown(self) -> None:
        """Leave the environment variables alone; the launcher that set them puts them back."""


class AloneEnvironment(LockstepEnvironment):
    """The environment of a Trainer of one rank where several are connected: each runs it alone, as rank 0 of 1."""

    def __init__(self, connected_rank: int) -> None:
        super().__init__()
        self.connected_rank = connected_rank  # the first one alone writes files and prints

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        """Return 0, the place of the one device."""
        return 0

    def node_rank(self) -> int:
        return 0


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


def requeue_job() -> str | None:
    """Ask Slurm to requeue the job of this process; return why it did not, or ``None`` where it does."""
    given = os.environ
    job = given.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in given:
        job = f"{given['SLURM_ARRAY_JOB_ID']}_{given.get('SLURM_ARRAY_TASK_ID', '')}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"scontrol: {error.strerror or error}"
    said = (done.stderr or done.stdout).strip().splitlines()
    return (
        None if done.returncode == 0 else f"scontrol requeue {job}: {said[-1] if said else done.returncode}"
    )


def check_has_device(
    environment: ClusterEnvironment,
    num_devices: int,
    num_nodes: int,
    connected: tuple[int, int] | None = None,  # the rank that this process is already, and of how many
) -> None:
    """Raise if the Trainer expects other ranks than were started or connected, as far as this rank can see."""
    external, expected = environment.creates_processes_externally, num_devices * num_nodes
    starts_others = not external and connected == (0, 1)
    mine = -1 if connected is None else environment.node_rank() * num_devices + environment.local_rank()
    if connected is not None and connected != (mine, expected) and not starts_others:
        by_another = external and launcher_pid() is None
        anew = "" if by_another else ", or let each Trainer start its own with strategy='lockstep_ddp_spawn'"
        raise LaunchError(
            f"devices={num_devices} and num_nodes={num_nodes} make this process rank {mine} of {expected}, but an"
            f" earlier Trainer, or the program that started it, has connected it as rank {connected[0]} of"
            f" {connected[1]}. Set devices to the number of ranks on each node, the same on every node and in every"
            f" Trainer of the script, and num_nodes to the number of nodes. Train on other ranks in a script of its"
            f" own{anew}. To validate, test or predict on one device: devices=1 and strategy='lockstep_ddp'."
        )
    if not external:
        return
    if connected is None and _started_by_rank_that_has_met():
        # Not raised: a program that caught it would go on here. Lightning ends its ranks for any other exit code.
        end_now(
            0,
            f"lightning-lockstep: process {os.getpid()} ends: it was started in addition to ranks that had met, which"
            " go on. Use either Lightning's strategies or lockstep_... in all Trainers of a script: each starts its"
            " own ranks.\n",
        )
    if environment.local_rank() < num_devices:
        return
    environment.validate_settings(num_devices=num_devices, num_nodes=num_nodes)
    raise LaunchError(
        f"devices={num_devices}, but at least {environment.local_rank() + 1} ranks were started on this node: expected"
        " as many devices as ranks. Set devices in the Trainer to the number of ranks of a node, or start fewer."
    )


def _started_by_rank_that_has_met() -> bool:
    """Return whether the process that started this one is a rank that had met the others before, or was one."""
    given = os.environ.get(HAS_MET)
    if given is None or given == str(os.getppid()):
        return given is not None
    try:
        os.kill(int(given), 0)
    except ProcessLookupError:  # it has ended since
        return True
    except OSError:
        return False
    return False
