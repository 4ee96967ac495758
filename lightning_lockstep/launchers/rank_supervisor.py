"""Looks after one rank: what it may use, how it stops when another rank fails, what it says on its way out.

Every strategy of ours holds one supervisor and hands it the few moments that matter: the launch, the process
group being up, a step boundary, the teardown.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_lockstep._lightning import SIGTERMException
from lightning_lockstep.distributed import Communicator, FailurePropagation, current_communicator
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.cpu_threads import apply_threads

__all__ = ["SupervisorSettings", "RankSupervisor"]


def _nobody() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    """What a user may set about how a rank is looked after; see the strategies for the meaning.

    Raises:
        ConfigurationError: One message with every value that cannot be used.
    """

    on_rank_failure: Literal["abort"] = "abort"
    grace_period: float = 10.0
    threads_per_rank: int | Literal["auto"] = "auto"
    bind_cores: bool = False

    def __post_init__(self) -> None:
        faults = []
        if self.on_rank_failure != "abort":
            faults.append(f"on_rank_failure={self.on_rank_failure!r}: expected 'abort'.")
        if not isinstance(self.grace_period, (int, float)) or not self.grace_period > 0:
            faults.append(f"grace_period={self.grace_period!r}: expected seconds, more than 0, such as 10.")
        threads = self.threads_per_rank
        whole = isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1
        if threads != "auto" and not whole:
            faults.append(f"threads_per_rank={threads!r}: expected 'auto' or a whole number from 1.")
        if not isinstance(self.bind_cores, bool):
            faults.append(f"bind_cores={self.bind_cores!r}: expected true or false.")
        if faults:
            raise ConfigurationError(faults)


class RankSupervisor:
    """Keeps one rank in step with the others from launch to teardown.

    Args:
        settings: What the user has set.

    Attributes:
        propagation: Tells the ranks when one fails; ``None`` until they have met.
        threads: CPU threads of this rank; 0 until the launch.
        cores: Numbers of the cores it may use.
        failure_file: Where this rank writes down its failure for a parent process that is no rank.
        on_force: Called before this process is ended by force; a launcher ends its children here.
    """

    def __init__(self, settings: SupervisorSettings) -> None:
        self.settings = settings
        self.propagation: FailurePropagation | None = None
        self.threads = 0
        self.cores: tuple[int, ...] = ()
        self.on_force: Callable[[], None] | None = None
        self.failure_file: Path | None = None
        self._trainer: Callable[[], Any] = _nobody

    def attach(self, trainer: Any) -> None:
        """Look after the loops and signals of ``trainer`` in this process.

        Ranks: every rank, before its Trainer runs; nothing is sent.
        """
        if trainer is None:
            return
        self._trainer = weakref.ref(trainer)
        # Lightning broadcasts a termination flag before every batch and again inside its signal handler,
        # which pairs up with whatever the others are doing. Here a rank that is told to end just does, at
        # the next batch, and the others hear of it over the side channel.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self.at_step_boundary
        trainer._signal_connector._sigterm_notifier_fn = self._told_to_end

    def apply_threads(self, *, local_rank: int, local_world_size: int) -> None:
        """Set this rank's CPU threads and cores.

        Ranks: every rank, for itself.
        """
        self.threads, self.cores = apply_threads(
            self.settings.threads_per_rank,
            bind_cores=self.settings.bind_cores,
            local_rank=local_rank,
            local_world_size=local_world_size,
        )

    def ranks_have_met(self, *, shows_report: bool) -> Communicator:
        """Open the side channel and begin to listen for failures.

        Args:
            shows_report: Whether this rank prints the report of another rank's failure.

        Returns:
            The communicator of the run.

        Ranks: all, together, right after the process group was made; one broadcast and a barrier.
        """
        communicator = current_communicator()
        if communicator.world_size > 1:
            self.propagation = propagation_on(communicator.side_channel)
            self.propagation.grace_period = self.settings.grace_period
            self.propagation.shows_report = shows_report
            self.propagation.where = self._where
            self.propagation.on_force = self.on_force
        return communicator

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; when it raises, tell the other ranks, or say which of them failed first.

        Raises:
            RankFailedError: Another rank failed first.
            BaseException: Whatever ``function`` raised, when this rank was the first.

        Ranks: every rank. Sends nothing unless something is wrong.
        """
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            raised = self.propagation.handle(error) if self.propagation is not None else error
            self._write_down()
            if raised is error:
                raise
            raise raised from None

    def at_step_boundary(self) -> None:
        """Stop here if another rank has failed or this one was told to end; costs two attribute reads.

        Ranks: every rank, before each batch; nothing is sent.
        """
        if self.propagation is not None:
            self.propagation.check()
        trainer = self._trainer()
        if trainer is not None and trainer.received_sigterm:
            raise SIGTERMException(128 + signal.SIGTERM)

    def watch_parent(self, parent: int | None) -> None:
        """End this process if the rank that started it is gone before the ranks have met.

        Ranks: a rank that another rank has started.
        """

        def watch() -> None:
            while self.propagation is None:
                if os.getppid() != parent:
                    os._exit(1)
                time.sleep(1.0)

        threading.Thread(target=watch, name="lockstep-parent", daemon=True).start()

    def _write_down(self) -> None:
        record = self.propagation.record if self.propagation is not None else None
        if record is not None and self.failure_file is not None:
            # Every rank that knows writes the same record; the move makes it appear whole.
            draft = self.failure_file.with_suffix(f".{os.getpid()}")
            draft.write_text(record.to_json(), encoding="utf-8")
            draft.replace(self.failure_file)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "propagation": None, "on_force": None, "_trainer": _nobody}

    def _told_to_end(self, signum: int, _: Any) -> None:
        trainer = self._trainer()
        if trainer is not None:
            trainer._signal_connector.received_sigterm = True

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
