"""DDP over MPI: collectives of the cluster's MPI library for an ordinary build of torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import Unpack

from lightning_lockstep._lightning import ClusterEnvironment, rank_zero_only
from lightning_lockstep._settings import Faults, settings_of
from lightning_lockstep._trainer import given_to_trainer
from lightning_lockstep.distributed.failure.exit_notes import note_orderly_end
from lightning_lockstep.distributed.mpi import backend as mpi_backend
from lightning_lockstep.distributed.mpi.progress import set_interruption
from lightning_lockstep.distributed.mpi.runtime import abort_when_leaving
from lightning_lockstep.distributed.process_group import has_backend
from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError, RankFailedError
from lightning_lockstep.launchers.environments import LockstepEnvironment, MPIEnvironment, detect_environment
from lightning_lockstep.launchers.mpirun import MPIRunLauncher
from lightning_lockstep.launchers.mpirun_command import MPIRunSettings, find_mpirun
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor
from lightning_lockstep.strategies.ddp import LockstepDDPStrategy
from lightning_lockstep.strategies.lifecycle import RankStartup
from lightning_lockstep.strategies.options import DDPSettings, OptionsOfDDP

_BACKENDS = ("auto", "mpi4py", "gloo", "nccl", "mpi")


class LockstepMPIStrategy(LockstepDDPStrategy):
    """DDP for ranks that mpirun, mpiexec or srun has started, or that it starts itself with mpirun.

    It has everything of :class:`LockstepDDPStrategy`: failure propagation, resolved precision, the table of
    which rank runs where, uneven inputs, gradient compression.

    Args:
        backend: ``auto``: nccl on CUDA, ``mpi4py`` (collectives of the MPI library) on CPU. Or one of ``mpi4py``,
            ``gloo``, ``nccl``, and ``mpi`` for a torch built with it.
        check: Whether the backend ``mpi4py`` compares operation, shape and dtype between the ranks before each
            collective, which costs a few microseconds; with ``guard="watch"`` too.
        cuda_aware: Whether the MPI library takes CUDA memory; by default the library is asked.
        hostfile: File with the hosts to start ranks on and their slots, in the form of the mpirun in use.
        mpirun: The command that starts ranks; by default the one next to this Python, else the one in
            ``PATH``.
        mpirun_args: Further arguments for it.
        ssh_args: Arguments for ssh to the other hosts, such as ``["-p", "2222"]``.
        cluster_environment: Tells which rank this process is; by default found by environment variables.
        grace_period: As for :class:`LockstepDDPStrategy`, like all that follows: time from learning of a failure
            until a rank is ended by force [s].
        silence_limit: How long a rank may be stopped, or its host unreachable, before that counts as a failure [s].
        uneven_inputs: When ranks have different numbers of training batches: ``error``, ``truncate`` or ``join``.
        iterable_datasets: ``as_given``, or ``shard`` to divide an ``IterableDataset`` among ranks and workers.
        threads_per_rank: CPU threads per rank; ``auto`` is usable cores / ranks of the node.
        bind_cores: Whether each rank is pinned to its own cores.
        timeout: Longest wait for another rank in a collective [s].
        guard: ``off``, ``watch`` or ``verify``.
        stall_timeout: How long a collective may take before the ranks compare where they are [s].
        ddp_comm_hook: Gradient compression, by name or as a function.
        ddp_comm_state: State for a hook given as a function.
        gradient_as_bucket_view: Whether gradients live in the buckets that are reduced.
        options: Further options of :class:`torch.nn.parallel.DistributedDataParallel` and of Lightning's strategy.

    Raises:
        ConfigurationError: One message with everything that cannot be used.
        MissingExtraError: ``backend="mpi4py"``, and it is not installed.

    Ranks: construct it in every process with the same arguments. Detection reads environment variables; MPI is
        started when the ranks are connected, not before.
    """

    strategy_name = "lockstep_mpi"

    def __init__(
        self,
        *,
        backend: Literal["auto", "mpi4py", "gloo", "nccl", "mpi"] = "auto",
        check: bool = True,
        cuda_aware: bool | None = None,
        hostfile: str | Path | None = None,
        mpirun: str | None = None,
        mpirun_args: Sequence[str] = (),
        ssh_args: Sequence[str] = (),
        cluster_environment: ClusterEnvironment | None = None,
        grace_period: float = 10.0,
        silence_limit: float = 120.0,
        uneven_inputs: Literal["error", "truncate", "join"] = "error",
        iterable_datasets: Literal["as_given", "shard"] = "as_given",
        threads_per_rank: int | Literal["auto"] = "auto",
        bind_cores: bool = False,
        timeout: float | timedelta = 1800.0,
        guard: Literal["off", "watch", "verify"] = "watch",
        stall_timeout: float = 60.0,
        ddp_comm_hook: Literal["fp16_compress", "bf16_compress", "power_sgd"]
        | Callable[..., Any]
        | None = None,
        ddp_comm_state: object | None = None,
        gradient_as_bucket_view: bool = True,
        **options: Unpack[OptionsOfDDP],
    ) -> None:
        _check_backend(backend, options)
        if not check and guard == "verify":
            raise ConfigurationError(
                "guard='verify' and check=False contradict each other: over mpi4py both control the same comparison."
                " Remove one."
            )
        self.backend = backend
        self._backend_options = mpi_backend.MPIBackendOptions(check=check, cuda_aware=cuda_aware)
        self._mpirun = MPIRunSettings(
            hostfile=hostfile, mpirun=mpirun, mpirun_args=tuple(mpirun_args), ssh_args=tuple(ssh_args)
        )
        settings = settings_of(DDPSettings, locals())
        super().__init__(cluster_environment=cluster_environment, **{**vars(settings), **options})
        environment = self.cluster_environment
        if isinstance(environment, MPIEnvironment):
            # Lightning takes every rank for rank 0 until the ranks are connected, and would print on each.
            rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]

    @staticmethod
    def detect_environment() -> ClusterEnvironment:
        """See :meth:`LockstepDDPStrategy.detect_environment`; ranks of ``srun --mpi=...`` are ranks of an MPI job."""
        return detect_environment(mpi=True)

    def make_startup(self) -> RankStartup:
        """See :meth:`LockstepDDPStrategy.make_startup`."""
        mpirun = replace(self._mpirun, grace_period=self.settings.grace_period)
        return MPIStartup(self.backend, self._backend_options, mpirun)


class MPIStartup(RankStartup):
    """How the ranks are started and connected: by mpirun or srun, over the collectives of the MPI library."""

    def __init__(self, backend: str, options: mpi_backend.MPIBackendOptions, mpirun: MPIRunSettings) -> None:
        super().__init__()
        self._given_backend, self._options, self.mpirun = backend, options, mpirun

    def adopt_ranks(self, strategy: Any) -> None:
        """With devices='auto', train on as many ranks as MPI has started."""
        if not isinstance(strategy.cluster_environment, MPIEnvironment):
            return
        rank = strategy.cluster_environment.mpi_rank
        if given_to_trainer("devices") != "auto" or rank.size % rank.local_size:
            return
        devices = list(strategy.parallel_devices or [torch.device("cpu")])
        strategy.parallel_devices = (devices * rank.local_size)[: rank.local_size]
        if strategy.num_nodes == 1:
            strategy.num_nodes = rank.size // rank.local_size

    def launcher(self, strategy: Any, supervisor: RankSupervisor) -> Any:
        """Return the launcher that runs mpirun, or the ordinary one where ranks need not be started, or not by MPI."""
        ranks = strategy.num_processes * strategy.num_nodes
        ordinary = super().launcher(strategy, supervisor)
        environment = strategy.cluster_environment
        if not isinstance(environment, LockstepEnvironment) or ranks == 1:
            return ordinary
        if environment.creates_processes_externally:
            return ordinary  # whoever started the ranks has set LOCAL_RANK; `connect` says what is missing
        if self._given_backend == "nccl" and self.mpirun.hostfile is None and self.mpirun.mpirun is None:
            return ordinary
        command = find_mpirun(self.mpirun)
        if command is None:
            raise LaunchError(
                "There is no mpirun next to this Python nor in PATH: install one with"
                " `pip install 'lightning-lockstep[mpi]'`, load your cluster's MPI module, or give mpirun=..."
                " Without MPI, train with the strategy lockstep_ddp (strategy=ddp)."
            )
        return MPIRunLauncher(
            self.mpirun, command, num_processes=strategy.num_processes, num_nodes=strategy.num_nodes
        )

    def share_of_cores(self, strategy: Any) -> tuple[int, int]:
        """See :meth:`RankStartup.share_of_cores`; cores to which mpirun has bound a rank are its own."""
        if isinstance(strategy.cluster_environment, MPIEnvironment):
            rendezvous = strategy.cluster_environment.rendezvous
            if rendezvous.sharing is not None:
                return rendezvous.place, rendezvous.sharing
        return super().share_of_cores(strategy)

    def connect(self, strategy: Any, timeout: timedelta) -> bool:
        self.backend = self._choose_backend(strategy)
        mpi_backend.default_options(self._options)
        return super().connect(strategy, timeout)

    def after_connect(self, supervisor: RankSupervisor) -> None:
        """Let a failure interrupt collectives over MPI, and ranks end in an order that shows the report."""
        note_orderly_end()
        propagation = supervisor.propagation
        if propagation is None:
            return

        def failed_elsewhere() -> BaseException | None:
            try:
                propagation.check()
            except RankFailedError as error:
                return error
            return None if supervisor.guard is None else supervisor.guard.error

        set_interruption(failed_elsewhere)
        # mpirun ends all ranks once one has failed: let the one that prints the report end first.
        abort_when_leaving(0.0 if propagation.prints_report else supervisor.settings.grace_period + 2.0)

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
                    f"The ranks of LockstepMPIStrategy were not started by MPI but are those of a"
                    f" {type(environment).__name__}: start them with mpirun, mpiexec or `srun --mpi=pmix`, or give"
                    " backend='gloo', or train with the strategy lockstep_ddp (strategy=ddp)."
                )
        if chosen == "mpi4py":
            mpi_backend.register_mpi_backend()
        return chosen


def _check_backend(backend: str, options: Mapping[str, Any]) -> None:
    faults = Faults()
    faults.choice("backend", backend, _BACKENDS)
    if "process_group_backend" in options:
        faults.add("process_group_backend was given to LockstepMPIStrategy: expected backend=... instead.")
    if options.get("start_method", "popen") != "popen":
        faults.add(f"start_method={options['start_method']!r}: ranks of this strategy are started by mpirun.")
    if backend == "mpi" and not has_backend("mpi"):
        faults.add(
            "backend='mpi': this torch was built without MPI, as all wheels are. Use 'mpi4py', which needs"
            " no such build."
        )
    if backend == "nccl" and not torch.cuda.is_available():
        faults.add("backend='nccl': there is no CUDA device here. Use 'auto', 'mpi4py' or 'gloo'.")
    faults.raise_all()
    if backend == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
        raise MissingExtraError("mpi4py", extra="mpi", needed_for="backend='mpi4py'")


def startup_over(backend: str | None, start_method: str) -> RankStartup:
    """Return how the ranks of any other strategy are started and connected: over MPI where that is the backend."""
    if backend in ("mpi4py", "mpi"):
        return MPIStartup(backend, mpi_backend.MPIBackendOptions(), MPIRunSettings())
    return RankStartup(start_method, backend)
