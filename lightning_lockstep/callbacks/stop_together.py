"""All ranks leave after the same batch, whichever of them wants to."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_lockstep._lightning import Callback, SLURMEnvironment
from lightning_lockstep.distributed import Communicator, current_communicator
from lightning_lockstep.distributed.failure.process_exit import expect_exit
from lightning_lockstep.distributed.stop_agreement import StepAgreement, StopDecision
from lightning_lockstep.errors import ConfigurationError, Preempted
from lightning_lockstep.stopping.breakpoint import (
    check_breakpoint,
    connect,
    fit_owns_boundaries,
    set_breakpoint,
)
from lightning_lockstep.stopping.loader_position import LoaderPosition
from lightning_lockstep.stopping.triggers import SignalWatch, StopFileWatch

__all__ = ["StopTogether", "check_breakpoint", "set_breakpoint"]

_log = logging.getLogger(__name__)
PREEMPTED = "preempted"


class StopTogether(Callback):
    """Ends a fit on all ranks after the same batch, when any rank has a reason to.

    :func:`set_breakpoint` on any rank ends the fit as early stopping does: ``fit`` returns, and
    :func:`check_breakpoint` tells why. A signal or a stop file on any rank means that the machine is wanted
    back: a checkpoint is saved first, and every rank ends with an exit code that says so. A run resumed from
    that checkpoint goes on with the next batch.

    With gradient accumulation all leave after the batch that completes the optimizer step.

    Args:
        signals: Names of the signals that mean "save and end".
        stop_file: A file that means the same once it exists; ``None`` for none. A relative path lies in the
            Trainer's ``default_root_dir``. It is removed when it was obeyed.
        exit_code: Exit code of every rank after a signal or a stop file; ``None`` lets ``fit`` return instead.
            75 is what ``sysexits.h`` calls a temporary failure: try again.
        dirpath: Folder of the checkpoint; by default that of the Trainer's checkpoint callback, else
            ``checkpoints`` in its ``default_root_dir``.
        filename: Name of the checkpoint, without ``.ckpt``.
        stop_file_interval: Time between two looks for the stop file [s].

    Raises:
        ConfigurationError: One message with every argument that cannot be used.
        Preempted: After a signal or a stop file, on every rank.

    Ranks: every rank has one. A batch costs less than a microsecond; a request costs 4 messages a rank over
    the side channel, and no collective. One reduction at the end of a fit.
    """

    def __init__(
        self,
        *,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        stop_file: str | Path | None = None,
        exit_code: int | None = 75,
        dirpath: str | Path | None = None,
        filename: str = "preempted",
        stop_file_interval: float = 1.0,
    ) -> None:
        faults = _faults(signals, exit_code, filename, stop_file_interval)
        if faults:
            raise ConfigurationError(faults)
        self.signals, self.stop_file, self.exit_code = tuple(signals), stop_file, exit_code
        self.dirpath, self.filename, self.stop_file_interval = dirpath, filename, stop_file_interval
        self.decision: StopDecision | None = None
        self._loaded: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self._agreement: StepAgreement | None = None
        self._communicator: Communicator | None = None
        self._position: LoaderPosition | None = None
        self._signal_watch: SignalWatch | None = None
        self._file_watch: StopFileWatch | None = None
        self._fit_loop: Any = None
        self._minimum: tuple[Any, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Connect to the other ranks and begin to count batches from zero.

        Ranks: all, together.
        """
        if stage != "fit":
            return
        self._end_watches()
        self._reset()
        self.decision = None
        self._communicator = current_communicator()
        self._agreement = connect()
        self._agreement.start_over(keep_requests=True)
        fit_owns_boundaries(True)
        self._position = LoaderPosition(self._communicator.world_size)
        self._fit_loop = trainer.fit_loop
        numbers = [signal.Signals[name] for name in self.signals]
        self._signal_watch = SignalWatch(numbers, self._preempt)
        if self.stop_file is not None and self._communicator.local_rank == 0:
            path = Path(trainer.default_root_dir, self.stop_file)
            self._file_watch = StopFileWatch(path, self._preempt, interval=self.stop_file_interval)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the signals over; Lightning has set its own handlers just before."""
        self._take_signals(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the signals over and, in a resumed epoch, go to the next batch of the data.

        Ranks: every rank, for itself.
        """
        self._take_signals(trainer)
        if self._position is None:
            return
        self._position.watch(trainer.fit_loop)
        self._position.load(self._loaded.pop("loaders", {}))
        self._position.go_on(trainer.fit_loop, batches=_batches_seen(trainer))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch loaders that were made anew for this epoch."""
        if self._position is not None:
            self._position.watch(trainer.fit_loop)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave if all ranks leave after this batch.

        Ranks: every rank, after every batch.
        """
        if self._agreement is None:
            return
        self.decision = self._agreement.passed() or self.decision
        # Gradients that were accumulated but not applied would be lost.
        if self.decision is not None and not trainer.fit_loop._should_accumulate():
            self._leave(trainer, self.decision)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the signals back, and obey one that came too late for a batch.

        Ranks: all, together; one reduction.
        """
        if self._agreement is None or self._communicator is None:
            return
        self._end_watches()
        self._restore_minimum(trainer)
        unheard = self._agreement.unanswered(PREEMPTED)
        agreed = self._communicator.agree(bool(unheard), "; ".join(unheard))
        if agreed:
            self._save_and_end(trainer, str(agreed).replace("\n", "; "))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the signals back."""
        self._end_watches()
        fit_owns_boundaries(False)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the signals back; the decision can still be asked for."""
        if stage == "fit":
            self._end_watches()
            fit_owns_boundaries(False)

    def state_dict(self) -> dict[str, Any]:
        """Return where the training loaders are."""
        if self._position is None or self._fit_loop is None:
            return {}
        return {"loaders": self._position.state(self._fit_loop)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take where the training loaders were."""
        self._loaded = dict(state_dict)

    def _preempt(self, reason: str) -> None:
        if self._agreement is not None:
            self._agreement.request(reason, kind=PREEMPTED)

    def _take_signals(self, trainer: Any) -> None:
        if self._signal_watch is not None:
            self._signal_watch.install(trainer._signal_connector._original_handlers)

    def _end_watches(self) -> None:
        if self._signal_watch is not None:
            self._signal_watch.restore()
        if self._file_watch is not None:
            self._file_watch.close()

    def _leave(self, trainer: Any, decision: StopDecision) -> None:
        """Leave after this batch; all ranks are here, with the same decision."""
        if trainer.should_stop and self._minimum is not None:
            return
        if decision.asks_for(PREEMPTED):
            self._save_and_end(trainer, decision.reason)
        else:
            self._say(trainer, f"All ranks leave after this batch. {decision.reason}")
        # `min_epochs` and `min_steps` are about early stopping; this is somebody's explicit wish.
        loop = trainer.fit_loop
        self._minimum = loop.min_epochs, loop.epoch_loop.min_steps
        loop.min_epochs = loop.epoch_loop.min_steps = None
        trainer.should_stop = True

    def _restore_minimum(self, trainer: Any) -> None:
        if self._minimum is not None:
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = self._minimum
            self._minimum = None

    def _save_and_end(self, trainer: Any, reason: str) -> None:
        path = self._save(trainer, reason)
        if self._file_watch is not None:
            self._file_watch.remove_file()
        if self.exit_code is None:
            self._say(trainer, f"All ranks leave after this batch; resume from {path}. {reason}")
            return
        self._say(
            trainer, f"All ranks end here with exit code {self.exit_code}; resume from {path}. {reason}"
        )
        expect_exit(self.exit_code)
        raise Preempted(reason, self.exit_code, path)

    def _save(self, trainer: Any, reason: str) -> str:
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            wanted = environment.requeue_signal or signal.SIGUSR1
            if f"received {signal.Signals(wanted).name}" in reason:
                # Lightning's own answer: it saves where it will look after the requeue, and requeues the job.
                trainer._signal_connector._slurm_sigusr_handler_fn(wanted, None)
                return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
        folder = self.dirpath or getattr(trainer.checkpoint_callback, "dirpath", None)
        folder = folder or Path(trainer.default_root_dir, "checkpoints")
        assert self._communicator is not None
        path: str = self._communicator.broadcast(str(Path(folder, f"{self.filename}.ckpt")))
        trainer.save_checkpoint(path)
        return path

    def _say(self, trainer: Any, text: str) -> None:
        if trainer.is_global_zero:
            _log.warning("%s (epoch %d, optimizer step %d)", text, trainer.current_epoch, trainer.global_step)


def _batches_seen(trainer: Any) -> int:
    """Return how many batches of the epoch that begins here were seen before the checkpoint; 0 without one."""
    loop = trainer.fit_loop
    if not loop.restarting:
        return 0
    seen = int(loop.epoch_loop.batch_progress.current.ready)
    return seen if seen < trainer.num_training_batches else 0


def _faults(signals: Any, exit_code: Any, filename: Any, interval: Any) -> list[str]:
    faults = []
    known = {s.name for s in signal.Signals} - {"SIGKILL", "SIGSTOP"}
    names = [signals] if isinstance(signals, str) else list(signals)
    if isinstance(signals, str):
        faults.append(f"signals={signals!r}: expected a list of names, such as ['SIGTERM', 'SIGUSR1'].")
    elif any(name not in known for name in names):
        wrong = ", ".join(repr(name) for name in names if name not in known)
        faults.append(
            f"signals has {wrong}: expected names of signals that can be caught, such as 'SIGTERM'."
        )
    if exit_code is not None and (not isinstance(exit_code, int) or not 0 <= exit_code <= 255):
        faults.append(f"exit_code={exit_code!r}: expected a number from 0 to 255, or None.")
    if not isinstance(filename, str) or not filename or "/" in filename:
        faults.append(f"filename={filename!r}: expected a name without a folder, such as 'preempted'.")
    if not isinstance(interval, (int, float)) or isinstance(interval, bool) or interval <= 0:
        faults.append(f"stop_file_interval={interval!r}: expected seconds, more than 0, such as 1.")
    return faults
