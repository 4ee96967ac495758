"""Lightning's cluster environments for ranks that Slurm, MPI or torchrun started, and which of them this is."""

from __future__ import annotations

import os
import zlib
from signal import SIGUSR1, Signals

from lightning_lockstep._lightning import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning_lockstep._settings import HAS_MET, MEMBER, launcher_pid
from lightning_lockstep._system import run_program
from lightning_lockstep._text import counted
from lightning_lockstep.distributed.failure.process_exit import end_now
from lightning_lockstep.distributed.mpi.backend import MPIRendezvous, agree_on_rendezvous
from lightning_lockstep.distributed.process_group import RankGroup
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.rank_variables import StartedRank, find_mpi_rank, find_slurm_step, slurm_job

# -- Ranks that another program has started --


class _StartedOutside(ClusterEnvironment):
    """The cluster environment of ranks whose numbers the program that started them has decided."""

    # Lightning's own constructor for Slurm is not called, because it refuses --ntasks without --ntasks-per-node.
    def __init__(self, here: StartedRank) -> None:
        self.here = here

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self.here.size

    def set_world_size(self, size: int) -> None:
        """Do nothing."""

    def global_rank(self) -> int:
        return self.here.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing."""

    def local_rank(self) -> int:
        return self.here.local_rank

    def node_rank(self) -> int:
        return self.here.node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if the Trainer expects other ranks than were started."""
        here = self.here
        if here.layout == (str(num_devices), str(num_nodes)):
            return
        each, nodes = here.layout
        raise LaunchError(
            f"The Trainer and {here.started_by} disagree about the ranks: devices={num_devices} and"
            f" num_nodes={num_nodes} are {num_devices * num_nodes} ranks, and {here.size} were started, {each} on each"
            f" of {nodes} nodes. Set devices and num_nodes to what was started, the same on every node. Or start as"
            f" many as the Trainer wants: ask Slurm for --nodes={num_nodes} --ntasks-per-node={num_devices}, or mpirun"
            f" for -n {num_devices * num_nodes}."
        )


_REQUEUE = 60.0  # how long Slurm may take to requeue a job [s]
# Ports that jobs are given: above those of services, below those that systems give to outgoing connections.
_FIRST_PORT, _PORTS = 12_000, 8_000


class SlurmStepEnvironment(_StartedOutside, SLURMEnvironment):
    """The cluster environment of the tasks of a Slurm step."""

    # Lightning reads the variables of the job, which are wrong if a step has fewer tasks than the job, or if a job
    # runs several steps at a time. This class reads the variables that srun sets for each step.

    auto_requeue = True
    requeue_signal = SIGUSR1

    @property
    def rendezvous_name(self) -> str:
        """What all ranks of this step have in common, and no others."""
        return f"Slurm step {self.here.step}"

    @property
    def main_address(self) -> str:
        if given := os.environ.get("MASTER_ADDR"):
            return given
        one_node = len(self.here.per_node) == 1
        return "127.0.0.1" if one_node else SLURMEnvironment.resolve_root_node_address(self.here.nodes)

    @property
    def main_port(self) -> int:
        given = os.environ.get("MASTER_PORT", "")
        if given.isdigit():
            return int(given)
        return _FIRST_PORT + zlib.crc32(str(self.here.step).encode()) % _PORTS


class MPIEnvironment(_StartedOutside):
    """The cluster environment of ranks of an MPI job."""

    # The ranks agree over MPI where to meet when they are first asked: without a fixed port no jobs on a host collide.

    @staticmethod
    def detect() -> bool:
        """Return whether this process is a rank of an MPI job; MPI is not started."""
        return find_mpi_rank() is not None

    @property
    def rendezvous(self) -> MPIRendezvous:
        # Every rank must take part in the first access, which starts MPI if mpi4py is installed.
        return agree_on_rendezvous(self.here.rank, self.here.size)

    @property
    def main_address(self) -> str:
        return self.rendezvous.address

    @property
    def main_port(self) -> int:
        return self.rendezvous.port


class SrunMPIEnvironment(MPIEnvironment, SlurmStepEnvironment):
    """The cluster environment of ranks of an MPI job that srun has started: Slurm requeues it as it does others."""


# -- Who started the ranks, read from environment variables only --
# Lightning's own environment for MPI starts MPI merely to find out whether there is one: this costs a second if mpi4py
# is installed, and hangs on clusters that allow MPI only under their own launcher. Lightning does not look if one of
# our strategies is given as an object, because that has its environment already.


class LockstepEnvironment(LightningEnvironment):
    """The environment of ranks that we start ourselves, or that the user starts by hand on each node."""

    # The port at which ranks meet is chosen at their start: a variable may be that of an earlier job of this process.

    def adopt_port(self, port: int) -> None:
        """Use ``port`` for the rendezvous; the launcher calls this once it listens there."""
        self._main_port = port

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if there are several nodes and nothing says where they meet."""
        if num_nodes > 1 and "MASTER_PORT" not in os.environ:
            raise LaunchError(
                f"num_nodes={num_nodes}: expected MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment of each"
                " node, by which the nodes find each other, or a start by torchrun, srun or mpirun. On one machine"
                " write num_nodes=1."
            )

    def teardown(self) -> None:
        """Leave the environment variables alone; the launcher that set them puts them back."""


class SlurmNodeEnvironment(LockstepEnvironment):
    """The cluster environment of the one task that srun has started on each node, to start the ranks there."""

    main_address, main_port = SlurmStepEnvironment.main_address, SlurmStepEnvironment.main_port

    def __init__(self, here: StartedRank) -> None:
        super().__init__()
        self.here = here

    def node_rank(self) -> int:
        return self.here.node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if the Trainer expects other nodes than were started."""
        if num_nodes != self.here.size:
            raise LaunchError(
                f"num_nodes={num_nodes}, but srun has started one task on each of {self.here.size} nodes:"
                f" expected num_nodes={self.here.size} and, in devices, the number of ranks on each node."
            )


def detect_environment(*, mpi: bool = False) -> ClusterEnvironment:
    """Return the cluster environment of this process, without starting or importing MPI.

    Args:
        mpi: Whether ranks that srun has started with an MPI type (``--mpi=pmi2``, ``pmix``) are to be ranks of an MPI
            job. On many clusters every srun does so, and without mpi4py they are none.

    Ranks: any rank, alone; reads environment variables.
    """
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    rank, step = find_mpi_rank(), find_slurm_step()
    if rank is not None and rank.step is None:
        return MPIEnvironment(rank)
    if rank is not None and mpi:
        return SrunMPIEnvironment(rank)
    if step is not None and step.size > 1 and MEMBER not in os.environ:  # a member is started by a task
        return SlurmStepEnvironment(step)
    if LSFEnvironment.detect():
        return LSFEnvironment()
    return LockstepEnvironment()


def belongs_to_slurm(environment: ClusterEnvironment) -> bool:
    """Return whether Slurm has started this rank, or the program that has started it as the one task of a step."""
    is_own = isinstance(environment, LockstepEnvironment) and find_slurm_step() is not None
    return is_own or isinstance(environment, SLURMEnvironment)


def requeue_signal(environment: ClusterEnvironment) -> Signals | None:
    """Return the signal on which the Slurm job is requeued, or ``None`` if it is not."""
    if isinstance(environment, SLURMEnvironment):
        return Signals(environment.requeue_signal or SIGUSR1) if environment.auto_requeue else None
    return SIGUSR1 if belongs_to_slurm(environment) else None


def requeue_job() -> str | None:
    """Ask Slurm to requeue the job of this process; return why it did not, or ``None`` if it does."""
    command = ["scontrol", "requeue", slurm_job()]
    answer = run_program(command, _REQUEUE)
    said = (answer.error or answer.output).strip().splitlines()
    return None if answer.succeeded else f"{' '.join(command)}: {said[-1] if said else answer.returncode}"


def check_has_device(
    environment: ClusterEnvironment,
    num_devices: int,
    num_nodes: int,
    group: RankGroup | None = None,  # by which this process is connected already
) -> None:
    """Raise if the Trainer expects other ranks than were started or connected, as far as this rank can see."""
    external = environment.creates_processes_externally
    if group is not None and (external or group.world_size > 1):
        _check_same_ranks(environment, num_devices, num_nodes, group)
    if not external:
        return
    if group is None and os.environ.get(HAS_MET) == str(os.getppid()):
        # Not raised: a program that caught it would go on here. Lightning ends its ranks for any other exit code.
        end_now(
            0,
            f"lightning-lockstep: process {os.getpid()} ends, because all ranks had met before it was started; they go"
            " on. In one script use only Lightning's strategies or only lockstep_...: each kind starts its own"
            " ranks.\n",
        )
    environment.validate_settings(num_devices=num_devices, num_nodes=num_nodes)
    # Who starts each rank by hand, or from a notebook, says how many there are; Kubeflow says how many pods.
    size, expected = os.environ.get("WORLD_SIZE", ""), num_devices * num_nodes
    by_hand = isinstance(environment, LockstepEnvironment) and launcher_pid() is None
    if by_hand and environment.creates_processes_externally and size.isdigit() and int(size) != expected:
        raise LaunchError(
            f"devices={num_devices} and num_nodes={num_nodes} ask for {counted(expected, 'rank')}, but {size} were"
            " started: expected as many. Set devices in the Trainer to the number of ranks of a node."
        )
    if environment.local_rank() >= num_devices:
        raise LaunchError(
            f"devices={num_devices}, but at least {environment.local_rank() + 1} ranks were started on this node:"
            " expected as many devices as ranks. Set devices in the Trainer to the number of ranks of a node, or start"
            " fewer."
        )


def _check_same_ranks(environment: ClusterEnvironment, num_devices: int, num_nodes: int, group: RankGroup) -> None:
    expected, mine = num_devices * num_nodes, environment.node_rank() * num_devices + environment.local_rank()
    # Number and place alone do not tell ranks that have met from ranks of another layout on other nodes.
    is_layout = group.layout in (None, (num_devices, num_nodes))
    if (group.rank, group.world_size) == (mine, expected) and is_layout:
        return
    by_another = environment.creates_processes_externally and launcher_pid() is None
    anew = "" if by_another else ", or let each Trainer start its own with strategy='lockstep_ddp_spawn'"
    # All ranks say the same about another number of ranks, so that it is printed once.
    size = group.world_size
    asked = f"ask for {counted(expected, 'rank')}" if size != expected else f"make this process rank {mine}"
    found = counted(size, "rank") if size != expected else f"it as rank {group.rank} of {size}"
    raise LaunchError(
        f"devices={num_devices} and num_nodes={num_nodes} {asked}, but an earlier Trainer, or the program that"
        f" started it, has connected {found}. Set devices to the number of ranks on each node, the same on every"
        " node and in every Trainer of the script, and num_nodes to the number of nodes. Train on other ranks in a"
        f" script of its own{anew}. An evaluation counts each sample once on any number of ranks."
    )
