"""DDP over MPI: collectives of the cluster's MPI library for an ordinary build of torch."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_lockstep._lightning import rank_zero_only
from lightning_lockstep._lightning.internals import given_to_trainer
from lightning_lockstep.distributed.failure.exit_note import note_orderly_end
from lightning_lockstep.distributed.mpi import backend as mpi_backend
from lightning_lockstep.distributed.mpi.progress import set_interruption
from lightning_lockstep.distributed.mpi.runtime import abort_when_leaving
from lightning_lockstep.distributed.process_group import has_backend
from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError, RankFailedError
from lightning_lockstep.launchers.cluster_environment import LockstepEnvironment, detect_environment
from lightning_lockstep.launchers.mpi_environment import MPIEnvironment
from lightning_lockstep.launchers.mpirun.launcher import MPIRunLauncher, MPIRunSettings, find_mpirun
from lightning_lockstep.strategies.ddp import LockstepDDPStrategy

__all__ = ["LockstepMPIStrategy"]

_log = logging.getLogger(__name__)
_BACKENDS = ("auto", "mpi4py", "gloo", "nccl", "mpi")


class LockstepMPIStrategy(LockstepDDPStrategy):
    """DDP for ranks that mpirun, mpiexec or srun has started, or that it starts itself with mpirun.

    Everything of :class:`LockstepDDPStrategy` holds here too: failure propagation, honest precision, the table of
    who runs where, uneven inputs, gradient compression.

    Args:
        backend: ``auto``: nccl on CUDA; on CPU ``mpi4py`` (collectives of the MPI library) where it is
            installed, else gloo. Or one of ``mpi4py``, ``gloo``, ``nccl``, and ``mpi`` for a torch built
            with it.
        check: Whether the backend ``mpi4py`` compares operation, shape and dtype between the ranks before
            each collective, for some microseconds.
        cuda_aware: Whether the MPI library takes CUDA memory; by default it is asked.
        shared_memory: Whether large sums over ``mpi4py`` go through memory that the ranks of a node share.
        hostfile: File with the hosts to start ranks on and their slots, in the form of the mpirun in use.
        mpirun: The command that starts ranks; by default the one beside this Python, else the one in
            ``PATH``.
        mpirun_args: Further arguments for it.
        ssh_args: Arguments for ssh to the other hosts, such as ``["-p", "2222"]``.
        options: As for :class:`LockstepDDPStrategy`, such as ``grace_period``, ``uneven_inputs``,
            ``timeout``.

    Raises:
        ConfigurationError: One message with everything that cannot be used.
        MissingExtraError: ``backend="mpi4py"``, and it is not installed.

    Ranks: construct it alike in every process. Detection reads environment variables; MPI is started when the
        ranks meet, not before.
    """

    strategy_name = "lockstep_mpi"

    def __init__(
        self,
        *,
        backend: Literal["auto", "mpi4py", "gloo", "nccl", "mpi"] = "auto",
        check: bool = True,
        cuda_aware: bool | None = None,
        shared_memory: bool = True,
        hostfile: str | Path | None = None,
        mpirun: str | None = None,
        mpirun_args: Sequence[str] = (),
        ssh_args: Sequence[str] = (),
        cluster_environment: Any | None = None,
        **options: Any,
    ) -> None:
        _check_backend(backend, options)
        self.backend = backend
        self._backend_options = mpi_backend.MPIBackendOptions(
            check=check, cuda_aware=cuda_aware, shared_memory=shared_memory
        )
        super().__init__(cluster_environment=cluster_environment or detect_environment(), **options)
        self.mpirun = MPIRunSettings(
            hostfile=hostfile,
            mpirun=mpirun,
            mpirun_args=tuple(mpirun_args),
            ssh_args=tuple(ssh_args),
            grace_period=self.supervisor.settings.grace_period,
        )
        if self._under_mpi:
            # Lightning takes every rank for rank 0 until the ranks have met, and greets once on each.
            rank_zero_only.rank = self._mpi.global_rank()  # type: ignore[attr-defined]

    @property
    def _under_mpi(self) -> bool:
        return isinstance(self.cluster_environment, MPIEnvironment)

    @property
    def _mpi(self) -> MPIEnvironment:
        assert isinstance(self.cluster_environment, MPIEnvironment)
        return self.cluster_environment

    def _configure_launcher(self) -> None:
        if self._under_mpi:
            self._take_the_ranks_there_are()
        super()._configure_launcher()
        ours = isinstance(self.cluster_environment, LockstepEnvironment)
        if (
            ours
            and self.num_processes * self.num_nodes > 1
            and self.backend in ("auto", "mpi4py", "mpi", "gloo")
        ):
            command = find_mpirun(self.mpirun)
            if command is not None:
                self._launcher = MPIRunLauncher(
                    self.mpirun, command, num_processes=self.num_processes, num_nodes=self.num_nodes
                )
            elif self.backend == "auto" and self.mpirun.hostfile is None:
                if self.cluster_environment.global_rank() == 0:
                    _say_once(
                        "There is no mpirun here, so the ranks are started as lockstep_ddp starts them."
                    )
            else:
                raise LaunchError(
                    "There is no mpirun beside this Python nor in PATH: install one with"
                    " `pip install 'lightning-lockstep[mpi]'`, load your cluster's MPI module, or give"
                    " mpirun=..."
                )

    def _take_the_ranks_there_are(self) -> None:
        """With devices='auto', train on as many ranks as were started."""
        rank = self._mpi.mpi_rank
        if given_to_trainer("devices") != "auto" or rank.size % rank.local_size:
            return
        devices = list(self.parallel_devices or [torch.device("cpu")])
        self.parallel_devices = (devices * rank.local_size)[: rank.local_size]
        if self.num_nodes == 1:
            self.num_nodes = rank.size // rank.local_size

    def setup_distributed(self) -> None:
        """Find the other ranks over MPI, make the process group and open the side channel.

        Raises:
            LaunchError: The environment variables, MPI and the Trainer disagree about the ranks.

        Ranks: all, together.
        """
        self._process_group_backend = self._choose_backend()
        mpi_backend.default_options(self._backend_options)
        super().setup_distributed()
        note_orderly_end()
        propagation = self.supervisor.propagation
        if propagation is not None:

            def failed_elsewhere() -> BaseException | None:
                try:
                    propagation.check()
                except RankFailedError as error:
                    return error
                return None

            set_interruption(failed_elsewhere)
            # mpirun ends all ranks once one has ended badly: let the one that prints the report go first.
            abort_when_leaving(
                0.0 if propagation.prints_report else self.supervisor.settings.grace_period + 2.0
            )

    def _choose_backend(self) -> str:
        device = self.root_device.type
        if self.backend == "auto":
            installed = importlib.util.find_spec("mpi4py") is not None
            by_mpi = self._under_mpi and installed
            chosen = "nccl" if device == "cuda" else "mpi4py" if by_mpi else "gloo"
            if self.global_rank == 0 and chosen == "gloo":
                why = "mpi4py is not installed" if not installed else "no mpirun has started the ranks"
                _say_once(f"The ranks talk over gloo, since {why}.")
        else:
            chosen = self.backend
        if chosen == "mpi4py":
            mpi_backend.register_mpi_backend()
        return chosen

    def _apply_threads(self) -> None:
        meeting = self._mpi.meeting if self._under_mpi else None
        if meeting is None or meeting.sharing is None:
            super()._apply_threads()
            return
        # mpirun may have bound each rank to cores of its own, which then need not be divided once more.
        self.supervisor.apply_threads(local_rank=meeting.place, local_world_size=meeting.sharing)


@functools.cache
def _say_once(text: str) -> None:
    _log.warning(text)


def _check_backend(backend: str, options: dict[str, Any]) -> None:
    faults = []
    if backend not in _BACKENDS:
        faults.append(f"backend={backend!r}: expected one of {', '.join(map(repr, _BACKENDS))}.")
    if "process_group_backend" in options:
        faults.append("process_group_backend was given to LockstepMPIStrategy: expected backend=... instead.")
    if options.get("start_method", "popen") != "popen":
        faults.append(
            f"start_method={options['start_method']!r}: ranks of this strategy are started by mpirun."
        )
    if backend == "mpi" and not has_backend("mpi"):
        faults.append(
            "backend='mpi': this torch was built without MPI, as all wheels are. Use 'mpi4py', which needs"
            " no such build."
        )
    if backend == "nccl" and not torch.cuda.is_available():
        faults.append("backend='nccl': there is no CUDA device here. Use 'auto', 'mpi4py' or 'gloo'.")
    if faults:
        raise ConfigurationError(faults)
    if backend == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
        raise MissingExtraError("mpi4py", extra="mpi", needed_for="backend='mpi4py'")
