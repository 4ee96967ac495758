"""The life of one rank: its CPU threads, its failures, its end."""

from __future__ import annotations

import math
import os
import signal
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from lightning_lockstep._lightning import (
    CSVLogger,
    SIGTERMException,
    TensorBoardLogger,
    TrainerFn,
    _TunerExitException,
)
from lightning_lockstep._settings import Faults, is_whole, settings_of
from lightning_lockstep._system import usable_cores
from lightning_lockstep._text import say
from lightning_lockstep.distributed import Communicator, FailurePropagation, current_communicator
from lightning_lockstep.distributed.failure.exit_notes import (
    keep_failure,
    parent_reads_notes,
    remove_earlier_report,
)
from lightning_lockstep.distributed.failure.process_exit import outcome, outcome_of
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.failure.record import BATCHES, describe_error, tell_place_by
from lightning_lockstep.distributed.guard.collective_call import tell_batch_by
from lightning_lockstep.distributed.guard.guard import CollectiveGuard, guard_on
from lightning_lockstep.distributed.guard.watch import GuardSettings
from lightning_lockstep.distributed.side_channel.opening import side_channel_if_open, use_silence_limit
from lightning_lockstep.errors import ConfigurationError, LockstepError

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


def folder_of_run(trainer: Any, job_folder: str | None) -> Path | None:
    """Return the folder for reports of a run: of its Hydra job, else of its logger, else ``default_root_dir``."""
    # As `trainer.log_dir`, which meets all ranks to tell it. None: none is written.
    root, logger = Path(trainer.default_root_dir), trainer.logger
    if trainer.fast_dev_run or "://" in str(trainer.default_root_dir):
        return None
    if logger is None or (job_folder is not None and Path(job_folder).resolve() == root.resolve()):
        return root
    folder = logger.log_dir if isinstance(logger, (CSVLogger, TensorBoardLogger)) else logger.save_dir
    if not isinstance(folder, (str, os.PathLike)) or "://" in str(folder):
        return root
    # The version of a logger is that of rank 0.
    return Path(folder) if trainer.is_global_zero or Path(folder).is_dir() else root


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
        job = current_job()  # a spawned rank, which gets this object, is in none
        self._job_folder = None if job is None else job[0]

    def attach(self, trainer: Any) -> None:
        """Handle step boundaries and SIGTERM for ``trainer`` in this process."""
        if trainer is None:
            return
        self._trainer = weakref.ref(trainer)
        tell_place_by(self._where)
        # A rank that is told to end does so at its next batch; the others learn of it over the side channel.
        # Lightning broadcasts a flag before each batch and another one in its signal handler, which then meets whatever
        # the other ranks are sending.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self.at_step_boundary
        trainer._signal_connector._sigterm_notifier_fn = self._told_to_end

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
        use_silence_limit(self.settings.silence_limit)
        communicator = current_communicator()
        if communicator.is_main and (folder := self._folder()) is not None:
            remove_earlier_report(folder)
        if communicator.world_size > 1:
            self.propagation = propagation_on(communicator.side_channel)
            self.propagation.begin_fit()
            self.propagation.grace_period = self.settings.grace_period
            self.propagation.prints_report = prints_report  # of another rank's failure
            self.propagation.parent_prints = parent_reads_notes()
            self.propagation.folder = self._folder
            self.propagation.on_force = self.on_force
            self.guard = guard_on(communicator.side_channel, self.propagation, self.settings.guard_settings)
            tell_batch_by(self._batch)
        return communicator

    def join_connected(self) -> None:
        """Take part in failures of ranks that are connected already, before they meet for this Trainer, if ever."""
        channel = side_channel_if_open(open_if_easy=True)
        if channel is not None:
            self.propagation = propagation_on(channel)
            self.propagation.folder = self._folder
            self.propagation.begin_fit()

    def refuse(self, error: LockstepError) -> NoReturn:
        """Raise an error that every rank raises, before the ranks meet for this Trainer: rank 0 prints it."""
        self.join_connected()
        raise error if self.propagation is None else self.propagation.error_to_raise(error)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; when it raises, inform the other ranks, or report which of them failed first."""
        try:
            return function(*args, **kwargs)
        except _TunerExitException:
            raise  # no failure: all ranks leave a run that was only to find something, and Lightning goes on
        except BaseException as error:
            if isinstance(error, SIGTERMException) and error.code is None:
                error.code = 128 + signal.SIGTERM  # Lightning's has none, and Python would exit with 0
            if self.propagation is None:
                self._keep_alone(error)
                raise
            raised = self.propagation.error_to_raise(error)
            if raised is error:
                raise
            raise raised from None

    def _keep_alone(self, error: BaseException) -> None:
        """Keep the failure of a run of one rank, or of rank 0 before the ranks have met."""
        trainer = self._trainer()
        if trainer is None or not trainer.is_global_zero:
            return
        # The program's own wish, or a stop on which all ranks have agreed.
        code = error.code if isinstance(error, SystemExit) and not isinstance(error, SIGTERMException) else 1
        if code in (None, 0, outcome.expected_exit_code):
            return
        record = describe_error(error, trainer.global_rank, trainer.world_size)
        outcome_of(error).saved = keep_failure(record.in_folder(self._folder())).saved_to()

    def at_step_boundary(self) -> None:
        """Stop here if another rank has failed or this one was told to end; costs a few attribute reads."""
        if self.propagation is not None:
            self.propagation.check()
        trainer = self._trainer()
        if trainer is not None and trainer.received_sigterm:
            raise SIGTERMException(128 + signal.SIGTERM)

    def say_interruption(self, error: BaseException, last_checkpoint: str) -> None:
        """Say on rank 0 which signal has ended a fit, on which rank and where, and how to go on from it."""
        trainer = self._trainer()
        if trainer is None or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        told = None if self.propagation is None else self.propagation.record
        record = told or describe_error(error, trainer.global_rank, trainer.world_size)
        told_to_end = record.summary.startswith("SIGTERMException")
        if record.kind != "interrupt" and not told_to_end:
            return
        given = "" if told_to_end else "signals=['SIGTERM', 'SIGINT']"
        goes_on = "This run has saved no checkpoint."
        if last_checkpoint:
            goes_on = (
                f"To go on from the last checkpoint of this run: fit(..., ckpt_path={last_checkpoint!r})."
            )
        # Of several ranks the report of a failure, which comes last, says it too.
        headline = f"{record.headline()}\n" if told is None or not told_to_end else ""
        saves = f"The callback StopTogether({given}) saves one at the end of the batch, and ends all ranks."
        say(f"\nlightning-lockstep: {headline}{goes_on} {saves}\n")

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
            trainer._signal_connector.received_sigterm = True  # trainer.received_sigterm can only be read

    def _folder(self) -> Path | None:
        trainer = self._trainer()
        with suppress(Exception):  # whatever a logger of the user says of its folder
            return None if trainer is None else folder_of_run(trainer, self._job_folder)
        return None

    def _batch(self) -> str:
        """Return where a fit is, as collectives of different places are not the same; nothing outside of one."""
        trainer = self._trainer()
        if trainer is None or trainer.state.stage is None or trainer.state.fn != TrainerFn.FITTING:
            return ""
        place = f"epoch {trainer.current_epoch}, batch {trainer.fit_loop.epoch_loop.batch_idx}"
        return place if trainer.training else f"{place}, {trainer.state.stage.value}"

    def _where(self) -> Mapping[str, Any]:
        trainer = self._trainer()
        if trainer is None:
            return {}
        stage = getattr(trainer.state.stage, "value", None) or "setup"
        place: dict[str, Any] = {}
        if trainer.state.fn == "fit":
            place = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        batch, batches = _batch(trainer, stage), _evaluation_batches(trainer)
        if batch >= 0:
            place["batch"] = batch
        return {**place, "stage": stage, **({} if batches is None else {BATCHES: batches})}


def _batch(trainer: Any, stage: str) -> int:
    """Return which batch of its stage a Trainer is at, from 0; below 0: none yet."""
    if stage == "train":
        return int(trainer.fit_loop.epoch_loop.batch_idx)
    of_validation = (
        trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == "fit" else trainer.validate_loop
    )
    loops = {"test": trainer.test_loop, "predict": trainer.predict_loop}
    loop = of_validation if stage in ("validate", "sanity_check") else loops.get(stage)
    return -1 if loop is None else int(loop.batch_progress.current.ready) - 1


def _evaluation_batches(trainer: Any) -> int | None:
    """Return how many batches this rank's loaders for evaluation have, if they are known."""
    by_function = {"test": trainer.num_test_batches, "predict": trainer.num_predict_batches}
    numbers = by_function.get(trainer.state.fn, trainer.num_val_batches)
    total = sum(numbers) if isinstance(numbers, list) else numbers
    return int(total) if total and math.isfinite(total) else None
