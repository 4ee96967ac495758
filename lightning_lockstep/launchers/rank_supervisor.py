"""The life of one rank: its CPU threads, its failures, its end."""

from __future__ import annotations

import os
import signal
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_lockstep._doors.lightning import SIGTERMException, _TunerExitException
from lightning_lockstep._doors.lightning_internals import (
    call_before_each_batch,
    call_on_sigterm,
    mark_sigterm_received,
)
from lightning_lockstep._settings import Faults, is_whole, settings_of
from lightning_lockstep._system import usable_cores
from lightning_lockstep.distributed import Communicator, FailurePropagation, current_communicator
from lightning_lockstep.distributed.failure.exit_notes import parent_reads_notes
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.guard.guard import CollectiveGuard, guard_on
from lightning_lockstep.distributed.guard.watch import GuardSettings
from lightning_lockstep.errors import ConfigurationError

# -- How many CPU threads a rank may use, and on which cores --


def plan_threads(
    threads_per_rank: int | Literal["auto"], *, cores: tuple[int, ...], local_rank: int, local_world_size: int
) -> tuple[int, tuple[int, ...]]:
    """Return the number of threads of a rank, and its own cores, which more ranks than cores share."""
    share = max(1, len(cores) // local_world_size)
    threads = share if threads_per_rank == "auto" else int(threads_per_rank)
    width = min(max(threads, 1), len(cores))
    first = (local_rank * width) % len(cores)
    mine = tuple(cores[(first + i) % len(cores)] for i in range(width))
    return threads, mine


def apply_threads(
    threads_per_rank: int | Literal["auto"], *, bind_cores: bool, local_rank: int, local_world_size: int
) -> tuple[int, tuple[int, ...]]:
    """Set the number of threads of this rank, and pin it to its cores if asked."""
    # ``OMP_NUM_THREADS`` set by the user (or by ``torchrun``) wins over ``auto``.
    cores = usable_cores()
    threads, mine = plan_threads(
        threads_per_rank, cores=cores, local_rank=local_rank, local_world_size=local_world_size
    )
    chosen_outside = os.environ.get("OMP_NUM_THREADS", "")
    if threads_per_rank == "auto" and chosen_outside.isdigit() and int(chosen_outside) > 0:
        threads = int(chosen_outside)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if not bind_cores:
        return threads, cores  # all that it may use
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError(
            "bind_cores=True was given, but this operating system cannot pin a process to cores;"
            " leave it out, or bind with the program that starts the ranks."
        )
    os.sched_setaffinity(0, mine)
    return threads, mine


# -- In which job of Hydra this process is, if in any --


def current_job() -> tuple[str, object] | None:
    """Return run folder and number of the Hydra job, which tell it from the next; ``None`` without Hydra."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    hydra = module.HydraConfig.get()
    return hydra.runtime.output_dir, hydra.job.get("num")


def report_folder(trainer: Any) -> Path | None:
    """Return where reports of a run are written; ``None`` if it has no folder. Nothing is sent."""
    folder, job = Path(trainer.default_root_dir), current_job()
    if folder != Path.cwd() or (job is not None and Path(job[0]).resolve() == folder):
        return folder
    # Nothing is left in a current folder that is no run folder: Lightning does not say who has named it.
    of_logger = getattr(trainer.logger, "log_dir", None)
    return Path(of_logger) if of_logger else None


# -- Per-rank life cycle: CPU threads, failure handling, exit report --
# Every strategy of ours holds one supervisor and calls it at the few moments that matter: the launch, the
# ranks having met, a step boundary. It knows the run by its communicator alone, so a strategy needs neither
# DistributedDataParallel nor a process group of torch to use it.


def _no_trainer() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings(GuardSettings):
    """What a user may set about the life cycle of a rank; see the strategies for the meaning."""

    grace_period: float = 10.0
    silence_limit: float = 120.0
    threads_per_rank: int | Literal["auto"] = "auto"
    bind_cores: bool = False

    def check(self, faults: Faults) -> None:
        super().check(faults)
        threads = self.threads_per_rank
        faults.number("grace_period", self.grace_period, what="seconds", above=0, such_as=10)
        faults.number("silence_limit", self.silence_limit, what="seconds", above=0, such_as=120)
        enough = threads == "auto" or (is_whole(threads) and threads >= 1)
        faults.check(enough, "threads_per_rank", threads, "'auto' or a whole number from 1")
        faults.flag("bind_cores", self.bind_cores)

    @property
    def guard_settings(self) -> GuardSettings:
        """Those of the collective guard alone: a next run with the same ones goes on with the same guard."""
        return settings_of(GuardSettings, vars(self))


class RankSupervisor:
    """Keeps one rank in step with the others from launch to exit."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self.settings = settings
        self.propagation: FailurePropagation | None = None  # None until the ranks have met
        self.guard: CollectiveGuard | None = None  # None until the ranks have met, and where it is off
        self.threads = 0  # until the launch
        self.cores: tuple[int, ...] = ()  # numbers of those that it may use
        # Called before this process is ended by force; a launcher ends its children here.
        self.on_force: Callable[[], None] | None = None
        self._trainer: Callable[[], Any] = _no_trainer

    def attach(self, trainer: Any) -> None:
        """Handle step boundaries and SIGTERM for ``trainer`` in this process."""
        if trainer is None:
            return
        self._trainer = weakref.ref(trainer)
        # A rank that is told to end does so at its next batch; the others learn of it over the side channel.
        call_before_each_batch(trainer, self.at_step_boundary)
        call_on_sigterm(trainer, self._told_to_end)

    def apply_threads(self, *, local_rank: int, local_world_size: int) -> None:
        self.threads, self.cores = apply_threads(
            self.settings.threads_per_rank,
            bind_cores=self.settings.bind_cores,
            local_rank=local_rank,
            local_world_size=local_world_size,
        )

    def ranks_have_met(self, *, prints_report: bool) -> Communicator:
        """Open the side channel and begin to listen for failures."""
        # All ranks come here together, right after they have met; each waits until rank 0 has come too.
        communicator = current_communicator()
        if communicator.world_size > 1:
            communicator.side_channel.silence_limit = self.settings.silence_limit
            self.propagation = propagation_on(communicator.side_channel)
            self.propagation.begin_fit()
            self.propagation.grace_period = self.settings.grace_period
            self.propagation.prints_report = prints_report  # of another rank's failure
            self.propagation.parent_prints = parent_reads_notes()
            self.propagation.where = self._where
            self.propagation.on_force = self.on_force
            self.guard = guard_on(communicator.side_channel, self.propagation, self.settings.guard_settings)
            if self.guard is not None:
                self.guard.folder = self._folder
        return communicator

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; when it raises, inform the other ranks, or report which of them failed first."""
        try:
            return function(*args, **kwargs)
        except _TunerExitException:
            raise  # no failure: all ranks leave a run that was only to find something, and Lightning goes on
        except BaseException as error:
            raised = error if self.propagation is None else self.propagation.error_to_raise(error)
            if raised is error:
                raise
            raise raised from None

    def at_step_boundary(self) -> None:
        """Stop here if another rank has failed or this one was told to end; costs a few attribute reads."""
        if self.propagation is not None:
            self.propagation.check()
        trainer = self._trainer()
        if trainer is not None and trainer.received_sigterm:
            raise SIGTERMException(128 + signal.SIGTERM)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "propagation": None,
            "guard": None,
            "on_force": None,
            "_trainer": _no_trainer,
        }

    def _told_to_end(self, signum: int, _: Any) -> None:
        trainer = self._trainer()
        if trainer is not None:
            mark_sigterm_received(trainer)

    def _folder(self) -> Path | None:
        trainer = self._trainer()
        return None if trainer is None else report_folder(trainer)

    def _where(self) -> Mapping[str, Any]:
        trainer = self._trainer()
        if trainer is None:
            return {}
        stage = trainer.state.stage
        return {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "batch": trainer.fit_loop.epoch_loop.batch_idx,
            "stage": getattr(stage, "value", None) or "setup",
        }
