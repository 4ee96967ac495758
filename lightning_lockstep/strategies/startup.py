"""How the ranks of a strategy are started and connected: by this program, or by mpirun or srun over MPI."""

from __future__ import annotations

import atexit
import importlib.util
from datetime import timedelta
from typing import Any

import torch

from lightning_lockstep._lightning import ClusterEnvironment, _destroy_dist_connection
from lightning_lockstep._text import install_command
from lightning_lockstep._trainer import given_to_trainer
from lightning_lockstep.distributed.failure.members import Membership
from lightning_lockstep.distributed.failure.record import note_orderly_end
from lightning_lockstep.distributed.mpi.backend import follow_failures, register_mpi_backend
from lightning_lockstep.distributed.process_group import (
    default_backend,
    process_group_exists,
    start_process_group,
)
from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError
from lightning_lockstep.launchers.environments import (
    LockstepEnvironment,
    MPIEnvironment,
    SlurmNodeEnvironment,
    SlurmStepEnvironment,
    detect_environment,
)
from lightning_lockstep.launchers.mpirun import MPIRunLauncher
from lightning_lockstep.launchers.mpirun_command import MPIRunSettings, find_mpirun
from lightning_lockstep.launchers.multiprocessing import SpawnedLauncher
from lightning_lockstep.launchers.outliving import OutlivingLauncher
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor
from lightning_lockstep.launchers.subprocess_script import ScriptLauncher, connected_group
from lightning_lockstep.strategies.outliving.can_outlive import check_fit, check_start
from lightning_lockstep.strategies.outliving.recovery import Recovery
from lightning_lockstep.xla.runtime import check_untouched


class RankStartup:
    """How the ranks of a strategy are started and connected: by this program, over a backend of torch."""

    script_launcher: type[ScriptLauncher] = ScriptLauncher
    outlives = False  # whether the others go on if a rank is lost
    connect_within: timedelta | None = None  # if not the timeout

    def __init__(self, start_method: str = "popen", backend: str | None = None) -> None:
        # Start method: popen, spawn, fork or forkserver. Without a backend, the default one of the device is used.
        self.start_method, self.backend = start_method, backend

    def environment(self, *, mpi: bool) -> ClusterEnvironment:
        """Return what tells which rank this process is; see :func:`detect_environment`."""
        return detect_environment(mpi=mpi)

    def adopt_ranks(self, strategy: Any) -> None:
        """Before the launch, take the number of ranks from the program that has started them."""

    def launcher(self, strategy: Any) -> Any:
        """Return the launcher that starts the ranks of this node."""
        environment, group = strategy.cluster_environment, connected_group()
        # Ranks that an earlier Trainer has connected run this script too, and are used again.
        exist = environment.creates_processes_externally or (group is not None and group.world_size > 1)
        if self.start_method == "popen" or exist:
            return self.script_launcher(strategy)
        if self.start_method == "fork":
            check_untouched()
        return SpawnedLauncher(strategy, self.start_method)

    def ranks_on_these_cores(self, strategy: Any) -> int:
        """Return how many ranks share the cores that this one may use."""
        return int(strategy.num_processes)

    def connect(self, strategy: Any, timeout: timedelta) -> bool:
        """Connect this rank with the others, and return whether it was not connected before."""
        is_new = not process_group_exists()
        self.backend = self.backend or default_backend(strategy.root_device)
        start_process_group(
            self.backend,
            rank=strategy.global_rank,
            world_size=strategy.world_size,
            address=strategy.cluster_environment.main_address,
            port=strategy.cluster_environment.main_port,
            timeout=timeout,
            device=strategy.root_device,
            name=getattr(strategy.cluster_environment, "rendezvous_name", None),
            connect_within=self.connect_within,
        )
        if is_new and "nccl" in self.backend:  # which warns at exit of what nobody has destroyed
            atexit.register(_destroy_dist_connection)
        return is_new

    def after_connect(self, supervisor: RankSupervisor) -> None:
        """Do what has to follow once the ranks are connected and failures propagate."""


class OutlivingStartup(RankStartup):
    """How the ranks are started and connected if the others outlive one that is lost."""

    outlives = True
    # They connect when all have said that they are ready, and a rank that is lost just then is waited for.
    connect_within = timedelta(seconds=5)
    _recovery: Recovery | None = None
    check_call = staticmethod(check_fit)  # called in the first process, before it starts any rank

    def environment(self, *, mpi: bool) -> ClusterEnvironment:
        """See :meth:`RankStartup.environment`; the one task that srun has started on each node is no rank."""
        found = super().environment(mpi=mpi)
        if isinstance(found, SlurmStepEnvironment) and set(found.here.per_node) == {1}:
            return SlurmNodeEnvironment(found.here)
        return found

    def launcher(self, strategy: Any) -> Any:
        """See :meth:`RankStartup.launcher`."""
        if strategy.num_processes * strategy.num_nodes == 1:
            return super().launcher(strategy)
        check_start(strategy)
        return OutlivingLauncher(strategy)

    def recovery(self, strategy: Any, membership: Membership, trainer: Any) -> Recovery:
        """Return what lets a call of a Trainer go on without ranks that are lost. Ranks: all; nothing is sent."""
        self._recovery = self._recovery or Recovery(strategy, membership)
        self._recovery.begin_call(trainer)
        return self._recovery


class MPIStartup(RankStartup):
    """How the ranks are started and connected: by mpirun or srun, over the collectives of the MPI library."""

    def __init__(self, backend: str, mpirun: MPIRunSettings) -> None:
        super().__init__()
        self._given_backend, self.mpirun = backend, mpirun

    def adopt_ranks(self, strategy: Any) -> None:
        """With devices='auto', train on as many ranks as MPI has started."""
        if not isinstance(strategy.cluster_environment, MPIEnvironment):
            return
        rank = strategy.cluster_environment.here
        if given_to_trainer("devices") != "auto" or rank.size % rank.local_size:
            return
        devices = list(strategy.parallel_devices or [torch.device("cpu")])
        strategy.parallel_devices = (devices * rank.local_size)[: rank.local_size]
        if strategy.num_nodes == 1:
            strategy.num_nodes = rank.size // rank.local_size

    def launcher(self, strategy: Any) -> Any:
        """Return the launcher that runs mpirun, or the ordinary one if MPI is not to start any ranks."""
        environment = strategy.cluster_environment
        is_alone = strategy.num_processes * strategy.num_nodes == 1
        needs_no_mpi = (self._given_backend, self.mpirun.hostfile, self.mpirun.mpirun) == ("nccl", None, None)
        # If another program has started the ranks, `connect` raises if it was not MPI.
        is_ours = isinstance(environment, LockstepEnvironment)
        if not is_ours or environment.creates_processes_externally or is_alone or needs_no_mpi:
            return super().launcher(strategy)
        command = find_mpirun(self.mpirun)
        if command is None:
            raise LaunchError(
                "There is no mpirun next to this Python nor in PATH: install one with"
                f" `{install_command('mpi')}`, load your cluster's MPI module, or give mpirun=..."
                " Without MPI, train with the strategy lockstep_ddp (strategy=ddp)."
            )
        return MPIRunLauncher(strategy, self.mpirun, command)

    def ranks_on_these_cores(self, strategy: Any) -> int:
        """See :meth:`RankStartup.ranks_on_these_cores`; cores to which mpirun has bound a rank are its own."""
        environment = strategy.cluster_environment
        sharing = environment.rendezvous.sharing if isinstance(environment, MPIEnvironment) else None
        return sharing or super().ranks_on_these_cores(strategy)

    def connect(self, strategy: Any, timeout: timedelta) -> bool:
        self.backend = self._choose_backend(strategy)
        return super().connect(strategy, timeout)

    def after_connect(self, supervisor: RankSupervisor) -> None:
        """Let a failure interrupt collectives over MPI, and ranks end in an order that shows the report."""
        note_orderly_end()
        propagation = supervisor.propagation
        if propagation is None:
            return
        # mpirun ends all ranks once one has failed: let the one that prints the report end first.
        delay = 0.0 if propagation.attempt.prints_report else supervisor.settings.grace_period + 2.0
        follow_failures(propagation.check, delay)

    def _choose_backend(self, strategy: Any) -> str:
        chosen = self._given_backend
        if chosen == "auto":
            environment = strategy.cluster_environment
            by_mpi = isinstance(environment, MPIEnvironment)
            installed = importlib.util.find_spec("mpi4py") is not None
            alone = strategy.num_processes * strategy.num_nodes == 1 and not (by_mpi and installed)
            chosen = "nccl" if strategy.root_device.type == "cuda" else "gloo" if alone else "mpi4py"
            if chosen == "mpi4py" and not installed:
                raise MissingExtraError(
                    "mpi4py", extra="mpi", needed_for="LockstepMPIStrategy on CPU, unless backend='gloo',"
                )
            if chosen == "mpi4py" and not by_mpi:
                raise LaunchError(
                    f"The ranks of LockstepMPIStrategy were not started by MPI (found: {type(environment).__name__}):"
                    " start them with mpirun, mpiexec or `srun --mpi=pmix`, give backend='gloo', or train with the"
                    " strategy lockstep_ddp (strategy=ddp)."
                )
        if chosen == "mpi4py":
            if strategy.root_device.type != "cpu":
                raise ConfigurationError(
                    f"backend='mpi4py' sends CPU tensors only, but the Trainer's device is {strategy.root_device}:"
                    " leave backend at 'auto', which is nccl on CUDA."
                )
            register_mpi_backend()
        return chosen


def startup_over(settings: Any) -> RankStartup:
    """Return how the ranks of a strategy for any backend are started and connected: over MPI if it is that."""
    if settings.process_group_backend in ("mpi4py", "mpi"):
        return MPIStartup(settings.process_group_backend, MPIRunSettings())
    return RankStartup(settings.start_method, settings.process_group_backend)
