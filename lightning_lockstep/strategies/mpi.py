"""DDP over MPI: collectives of the cluster's MPI library for an ordinary build of torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import Unpack

from lightning_lockstep._lightning import rank_zero_only
from lightning_lockstep._settings import Faults
from lightning_lockstep.distributed.process_group import has_backend
from lightning_lockstep.errors import MissingExtraError
from lightning_lockstep.launchers.environments import MPIEnvironment
from lightning_lockstep.launchers.mpirun_command import MPIRunSettings
from lightning_lockstep.strategies.ddp import LockstepDDPStrategy
from lightning_lockstep.strategies.options import OptionsOfMPI
from lightning_lockstep.strategies.startup import MPIStartup, RankStartup

_BACKENDS = ("auto", "mpi4py", "gloo", "nccl", "mpi")


class LockstepMPIStrategy(LockstepDDPStrategy):
    """DDP for ranks that mpirun, mpiexec or srun has started, or that it starts itself with mpirun.

    It has everything of :class:`LockstepDDPStrategy`: failure propagation, resolved precision, the table of
    which rank runs where, uneven inputs, gradient compression.

    Args:
        backend: ``auto``: nccl on CUDA, ``mpi4py`` (collectives of the MPI library) on CPU. Or one of ``mpi4py``,
            ``gloo``, ``nccl``, and ``mpi`` for a torch built with it.
        hostfile: File with the hosts to start ranks on and their slots, in the form of the mpirun in use.
        mpirun: The command that starts ranks; by default the one next to this Python, else the one in ``PATH``.
        mpirun_args: Further arguments for it.
        ssh_args: Arguments for ssh to the other hosts, such as ``["-p", "2222"]``.
        options: Those of :class:`LockstepDDPStrategy`, except ``start_method`` and ``process_group_backend``.

    Raises:
        ConfigurationError: One message with everything that cannot be used.
        MissingExtraError: ``backend="mpi4py"``, and it is not installed.

    Ranks: construct it in every process with the same arguments. Detection reads environment variables; MPI is
        started when the ranks are connected, not before.
    """

    strategy_name = "lockstep_mpi"
    trains_over_mpi = True

    def __init__(
        self,
        *,
        backend: Literal["auto", "mpi4py", "gloo", "nccl", "mpi"] = "auto",
        hostfile: str | Path | None = None,
        mpirun: str | None = None,
        mpirun_args: Sequence[str] = (),
        ssh_args: Sequence[str] = (),
        **options: Unpack[OptionsOfMPI],
    ) -> None:
        _check_backend(backend, options)
        self.backend = backend
        self._mpirun = MPIRunSettings(
            hostfile=hostfile, mpirun=mpirun, mpirun_args=tuple(mpirun_args), ssh_args=tuple(ssh_args)
        )
        super().__init__(**options)
        environment = self.cluster_environment
        if isinstance(environment, MPIEnvironment):
            # Lightning takes every rank for rank 0 until the ranks are connected, and would print on each.
            rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]

    def make_startup(self) -> RankStartup:
        """See :meth:`LockstepDDPStrategy.make_startup`."""
        return MPIStartup(self.backend, self._mpirun)


def _check_backend(backend: str, options: Mapping[str, Any]) -> None:
    faults = Faults()
    faults.choice("backend", backend, _BACKENDS)
    if "process_group_backend" in options:
        faults.add("process_group_backend was given to LockstepMPIStrategy: expected backend=... instead.")
    method, loss = options.get("start_method", "popen"), options.get("on_lost_rank", "end")
    starts = "none, because mpirun starts the ranks of this strategy"
    faults.check(method == "popen", "start_method", method, starts)
    ends = "'end', because mpirun ends all ranks when one does. Use LockstepDDPStrategy, which starts them itself"
    faults.check(loss == "end", "on_lost_rank", loss, ends)
    without = "'mpi4py', because this torch was built without MPI, like all wheels"
    faults.check(backend != "mpi" or has_backend("mpi"), "backend", backend, without)
    no_gpu = "'auto', 'mpi4py' or 'gloo', because there is no CUDA device here"
    faults.check(backend != "nccl" or torch.cuda.is_available(), "backend", backend, no_gpu)
    faults.raise_all()
    if backend == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
        raise MissingExtraError("mpi4py", extra="mpi", needed_for="backend='mpi4py'")
