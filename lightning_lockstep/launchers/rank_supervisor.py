"""The life of one rank: its CPU threads, its failures, its end."""

from __future__ import annotations

import os
import signal
import socket
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
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
from lightning_lockstep._system import shell_exit_code, usable_cores
from lightning_lockstep._text import say
from lightning_lockstep.distributed import Communicator, FailurePropagation, current_communicator, shut_down
from lightning_lockstep.distributed.failure.process_exit import (
    ExitReport,
    end_now,
    exit_plan,
    set_exit_report,
)
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.failure.record import (
    describe_error,
    keep_failure,
    place_in_words,
    remove_earlier_report,
    tell_place_by,
)
from lightning_lockstep.distributed.guard.collective_call import tell_batch_by
from lightning_lockstep.distributed.guard.guard import GuardSettings, guard_on
from lightning_lockstep.distributed.process_group import current_group
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.distributed.side_channel.opening import side_channel_if_open
from lightning_lockstep.errors import LockstepError
from lightning_lockstep.launchers.hydra import current_hydra_config

# -- How many CPU threads a rank may use --


def apply_threads(threads_per_rank: int | Literal["auto"], *, ranks_here: int) -> int:
    """Set the number of threads of this rank, one of several that share the usable cores; return it."""
    # ``OMP_NUM_THREADS`` set by the user (or by ``torchrun``) wins over ``auto``.
    if threads_per_rank == "auto":
        chosen = os.environ.get("OMP_NUM_THREADS", "")
        given = int(chosen) if chosen.isdigit() else 0
        threads = given or max(1, len(usable_cores()) // ranks_here)
    else:
        threads = threads_per_rank
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    return threads


# -- In which job of Hydra this process is, if in any --


def current_job() -> tuple[str, object] | None:
    """Return run folder and number of the Hydra job, which tell it from the next; ``None`` without Hydra."""
    config = current_hydra_config()
    return None if config is None else (config.hydra.runtime.output_dir, config.hydra.job.get("num"))


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


_elsewhere: object = None


def end_as_ranks_did(code: int) -> None:
    """End this process, which has started the ranks of its run, as they have; go on in a Hydra job that went well."""
    global _elsewhere
    if current_job() is None or code:
        end_now(code, by_force=False)
    _elsewhere = current_job()


def ran_elsewhere() -> bool:
    """Return whether the ranks of this Hydra job have run, and ended, in processes that this one has started."""
    return _elsewhere is not None and _elsewhere == current_job()


# -- Per-rank life cycle: CPU threads, failure handling, exit report --
# Each strategy of ours has one supervisor and calls it at the launch, when the ranks have met and at step boundaries.


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings(GuardSettings):
    """What a user may set about the life cycle of a rank; see the strategies for the meaning."""

    grace_period: float = 10.0
    silence_limit: float = 120.0
    threads_per_rank: int | Literal["auto"] = "auto"

    def check(self, faults: Faults) -> None:
        super().check(faults)
        threads = self.threads_per_rank
        faults.number("grace_period", self.grace_period, what="seconds", above=0, such_as=10)
        faults.number("silence_limit", self.silence_limit, what="seconds", above=0, such_as=120)
        enough = threads == "auto" or (is_whole(threads) and threads >= 1)
        faults.check(enough, "threads_per_rank", threads, "'auto' or a whole number from 1")


class RankSupervisor:
    """Keeps one rank in step with the others from launch to exit."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self.settings = settings
        self.propagation: FailurePropagation | None = None  # None until the ranks have met
        self.in_batches = True  # False: the ranks that have met come from different batches
        self._trainer: Callable[[], Any] = NoneType  # which returns None, and can be pickled
        job = current_job()  # a spawned rank, which gets this object, is in none
        self._job_folder = None if job is None else job[0]

    def attach(self, trainer: Any) -> None:
        """Handle step boundaries and SIGTERM for ``trainer`` in this process."""
        if trainer is None:
            return
        self._trainer = weakref.ref(trainer)
        tell_place_by(self._where)
        # A rank that is told to end does so at its next batch; the others learn of it over the side channel. Lightning
        # broadcasts a flag before each batch and one in its signal handler, which meets what other ranks are sending.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self.at_step_boundary
        trainer._signal_connector._sigterm_notifier_fn = self._told_to_end

    def meet_again(self, timeout: float) -> bool:
        """Begin a further attempt of connected ranks; return whether they connect anew: after a failure, or options."""
        # `timeout`: longest wait for another rank, now and in each collective [s].
        group, options = current_group(), (timeout, self.settings.silence_limit)
        if self.propagation is None or group is None:
            return False
        self.propagation.check()  # a failure may have ended this attempt already
        connects_anew = self.propagation.attempt.meet(timeout, renews=group.options != options)
        if connects_anew:
            self.forget_group()
        return connects_anew

    def ranks_have_met(self, timeout: float, *, prints_report: bool) -> Communicator:
        """Open the side channel and begin to listen for failures."""
        # All ranks come here together, right after they have met; each waits until rank 0 has come too.
        communicator, group = current_communicator(), current_group()
        if communicator.is_main and (folder := self.folder()) is not None:
            remove_earlier_report(folder)
        if communicator.world_size > 1 and group is not None:
            group.options = timeout, self.settings.silence_limit
            propagation = self.propagation or self._take_part(communicator.side_channel)
            # Without the other settings, so that a next run with the same settings of the guard keeps the same guard.
            settings = settings_of(GuardSettings, vars(self.settings))
            propagation.attempt.prints_report = prints_report  # of another rank's failure
            of_ranks = communicator.gather((settings.guard, socket.gethostname(), os.getpid()))
            guards = [guard for guard, *_ in of_ranks]
            guard_on(communicator.side_channel, propagation, settings, of_ranks=guards)
            if not propagation.store_port:
                processes = [(host, pid) for _, host, pid in of_ranks]
                propagation.have_met(processes, int(os.environ.get("MASTER_PORT") or 0))
            tell_batch_by(self._batch)
        return communicator

    def _take_part(self, channel: SideChannel) -> FailurePropagation:
        """Enter the next attempt, with what the user has set about failures before one can arrive."""
        self.propagation = propagation = propagation_on(channel)
        propagation.attempt.grace_period = self.settings.grace_period
        propagation.attempt.folder = self.folder
        propagation.check_told_to_end = self._check_sigterm
        propagation.enter()
        return propagation

    def refuse(self, error: LockstepError) -> NoReturn:
        """Raise an error that every rank raises, before the ranks meet for this Trainer: rank 0 prints it."""
        group = current_group()
        if not self._rejoin() and group is not None and group.rank:
            set_exit_report(error, ExitReport(replaces=True))
        raise error if self.propagation is None else self.propagation.error_to_raise(error)

    def _rejoin(self) -> bool:
        """Enter the next attempt of ranks that an earlier Trainer has connected; return whether one has."""
        # They may fail before they meet again, or may never meet for this Trainer.
        self.propagation, group, channel = None, current_group(), side_channel_if_open()
        if group is not None and group.options is not None and channel is not None:
            self._take_part(channel)
        return self.propagation is not None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; when it raises, inform the other ranks, or report which of them failed first."""
        try:
            return self.attempt(function, *args, **kwargs)
        except BaseException as error:
            self.raise_for(error)

    def attempt(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` as an attempt of all ranks."""
        self._rejoin()
        answer = function(*args, **kwargs)
        self._leave()
        return answer

    def raise_for(self, error: BaseException) -> NoReturn:
        """Inform the other ranks of an error and raise it, or raise that of the rank that failed first."""
        if isinstance(error, _TunerExitException):
            self._leave()
            raise error  # no failure: all ranks leave a run that was only to find something, and Lightning goes on
        raised = self._error_to_raise(error)
        if raised is error:
            raise error
        raise raised from None

    def _error_to_raise(self, error: BaseException) -> BaseException:
        if isinstance(error, SIGTERMException) and error.code is None:
            # Lightning's has none, and Python would exit with 0.
            error.code = shell_exit_code(-signal.SIGTERM)
        if self.propagation is None:
            self._keep_alone(error)
            return error
        raised = self.propagation.error_to_raise(error)
        if isinstance(raised, KeyboardInterrupt):
            self._say_interrupted()
        return raised

    def forget_group(self) -> None:
        """Leave a group that is broken, without waiting for a rank of it."""
        self._leave()  # what counts down to the end of its last attempt ends no rank
        self.propagation = None
        shut_down(0.0, destroy_process_group=True)

    def leave_if_raised(self) -> None:
        """Be over with an attempt in which this rank has raised, because its Trainer has cleaned up."""
        if self.propagation is not None and self.propagation.attempt.state == "raised":
            self.propagation.attempt.leave()

    def _leave(self) -> None:
        if self.propagation is not None:
            self.propagation.attempt.leave()

    def _keep_alone(self, error: BaseException) -> None:
        """Keep the failure of a run of one rank, or of rank 0 before the ranks have met."""
        trainer = self._trainer()
        if trainer is None or not trainer.is_global_zero:
            return
        # The program's own wish, or a stop on which all ranks have agreed.
        code = error.code if isinstance(error, SystemExit) and not isinstance(error, SIGTERMException) else 1
        if code in (None, 0, exit_plan.expected_exit_code):
            return
        record = describe_error(error, trainer.global_rank, trainer.world_size)
        set_exit_report(error, ExitReport(keep_failure(record.in_folder(self.folder())).saved_to()))

    def _say_interrupted(self) -> None:
        """Say where Ctrl-C has ended a script, and which checkpoint there is; a Hydra job says that itself."""
        trainer = self._trainer()
        if trainer is None or not trainer.is_global_zero or self._job_folder is not None:
            return
        names = ("last_model_path", "best_model_path")
        saved = (getattr(one, name, "") for name in names for one in trainer.checkpoint_callbacks)
        kept = next(filter(None, saved), "")
        goes_on = f"to go on: ckpt_path={kept!r}" if kept else "no checkpoint was saved"
        say(f"\nlightning-lockstep: interrupted at {place_in_words(self._where())}; {goes_on}.")

    def at_step_boundary(self) -> None:
        """Stop here if another rank has failed or this one was told to end; costs a few attribute reads."""
        if self.propagation is not None:
            self.propagation.check()
        self._check_sigterm()

    def _check_sigterm(self) -> None:
        trainer = self._trainer()
        if trainer is not None and trainer.received_sigterm:
            raise SIGTERMException(shell_exit_code(-signal.SIGTERM))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "propagation": None, "_trainer": NoneType}

    def _told_to_end(self, signum: int, _: Any) -> None:
        trainer = self._trainer()
        if trainer is not None:
            trainer._signal_connector.received_sigterm = True  # trainer.received_sigterm can only be read

    def folder(self) -> Path | None:
        trainer = self._trainer()
        with suppress(Exception):  # whatever a logger of the user says of its folder
            return None if trainer is None else folder_of_run(trainer, self._job_folder)
        return None

    def _batch(self) -> str:
        """Return at which batch a fit is, because ranks at different batches call different collectives."""
        trainer = self._trainer()
        is_fit = self.in_batches and trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if not is_fit or trainer.state.stage is None:
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
        # Lightning has no public name for the loop of the present stage.
        loop = trainer._active_loop
        loop = getattr(loop, "epoch_loop", loop)  # of a fit: the loop over its batches
        if loop is not None and (ready := loop.batch_progress.current.ready):
            place["batch"] = ready - 1
        return {**place, "stage": stage}
