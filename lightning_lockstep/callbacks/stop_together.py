"""All ranks leave after the same batch, whichever of them wants to."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_lockstep._settings import Faults
from lightning_lockstep._system import write_report
from lightning_lockstep.callbacks.ends_with_run import EndsWithRun
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.checkpoint_folder import PREEMPTED_FILE
from lightning_lockstep.distributed.coordination.stop_agreement import StepAgreement, StopDecision
from lightning_lockstep.distributed.failure.process_exit import outcome
from lightning_lockstep.errors import Preempted
from lightning_lockstep.launchers.environments import requeue_job, requeue_signal
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.stopping.loader_position import LoaderPosition
from lightning_lockstep.stopping.stop_requests import SignalWatch, StopFile, connect

_log = logging.getLogger(__name__)
PREEMPTED = "preempted"


class StopTogether(EndsWithRun):
    """Ends a fit on all ranks after the same batch, when any rank asks for it.

    :func:`set_breakpoint` on any rank ends the fit as early stopping does: ``fit`` returns, and
    :func:`check_breakpoint` returns who asked and why. A signal or a stop file on any rank means that the
    machine is needed for something else: a checkpoint is saved first, and every rank ends with ``exit_code``. A
    run resumed from that checkpoint continues with the next batch.

    With gradient accumulation all ranks stop after the batch that completes the optimizer step.

    Args:
        signals: Names of the signals that mean "save and end".
        stop_file: A file that means the same once it exists, looked for each second; ``None`` for none. A relative path
            lies in the Trainer's ``default_root_dir``. It is removed after the checkpoint is saved.
        exit_code: Exit code of every rank after a signal or a stop file; ``None`` lets ``fit`` return instead.
            75 is what ``sysexits.h`` calls a temporary failure: try again.
        dirpath: Folder of the checkpoint; by default that of the Trainer's checkpoint callback, else
            ``checkpoints`` in its ``default_root_dir``.
        filename: Name of the checkpoint, without ``.ckpt``.

    Raises:
        ConfigurationError: One message with every argument that cannot be used.
        Preempted: After a signal or a stop file, on every rank.

    Ranks: every rank has one. A batch costs less than a microsecond; a request costs 4 messages per rank over
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
    ) -> None:
        super().__init__()
        faults = Faults()
        expected = "a list of names, such as ['SIGTERM', 'SIGUSR1']"
        if faults.check(not isinstance(signals, str), "signals", signals, expected):
            known = {s.name for s in signal.Signals} - {"SIGKILL", "SIGSTOP"}
            for name in signals:
                expected = "names of signals that can be caught, such as 'SIGTERM'"
                faults.check(name in known, "signals", name, expected)
        faults.whole("exit_code", exit_code, least=0, most=255, optional=True)
        is_name = isinstance(filename, str) and bool(filename) and "/" not in filename
        faults.check(is_name, "filename", filename, "a name without a folder, such as 'preempted'")
        faults.raise_all()
        self.signals, self.stop_file, self.exit_code = tuple(signals), stop_file, exit_code
        self.dirpath, self.filename = dirpath, filename
        self.decision: StopDecision | None = None
        self._reset()

    def _reset(self) -> None:
        self._agreement: StepAgreement | None = None
        self._signal_watch = SignalWatch((), self._preempt)
        self._file: StopFile | None = None
        self._minimum: tuple[Any, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Connect to the other ranks and begin to count batches from zero. Ranks: all, together."""
        if stage != "fit":
            return
        self.at_end.close()
        self._reset()
        self.decision = None
        self._agreement = connect()
        self._agreement.start_over(keep_requests=True)
        self.at_end.enter_context(replaced(self._agreement, in_fit=True))
        LoaderPosition.attach(trainer)  # strategies of this package have done so
        if self.stop_file is not None and trainer.local_rank == 0:
            self._file = StopFile(Path(trainer.default_root_dir, self.stop_file), self._preempt)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Note whose signal handlers there are, before Lightning sets its own."""
        requeues = requeue_signal(trainer._accelerator_connector.cluster_environment)
        numbers = {*(signal.Signals[name] for name in self.signals), *([requeues] if requeues else [])}
        self._signal_watch = SignalWatch(sorted(numbers), self._preempt)
        self.at_end.callback(self._signal_watch.restore)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over the signals; Lightning has set its own handlers just before. Without a check, before training."""
        self._signal_watch.install()

    on_train_start = on_sanity_check_start

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave if all ranks leave after this batch. Ranks: every rank, after every batch."""
        if self._agreement is None:
            return
        if self._file is not None:
            self._file.look()
        self.decision = self._agreement.passed() or self.decision
        # In the middle of an optimizer step the accumulated gradients would be lost.
        if self.decision is not None and _completes_optimizer_step(trainer):
            self._leave(trainer, self.decision)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Put signal handlers back, and act on a signal after the last batch. Ranks: all, together; one reduction."""
        if self._agreement is None:
            return
        self._signal_watch.restore()
        if self._minimum is not None:
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = self._minimum
            self._minimum = None
        unanswered = self._agreement.unanswered(PREEMPTED)
        agreed = current_communicator().agree(bool(unanswered), "; ".join(unanswered))
        if agreed:
            self._agreement.start_over()  # the requests are answered, and must not stop the next fit
            self._save_and_end(trainer, "; ".join(f"rank {rank}: {why}" for rank, why in agreed.items()))

    def _preempt(self, reason: str) -> None:
        if self._agreement is not None:
            self._agreement.request(reason, kind=PREEMPTED)

    def _leave(self, trainer: Any, decision: StopDecision) -> None:
        """Leave after this batch; all ranks are here, with the same decision."""
        if trainer.should_stop and self._minimum is not None:
            return
        if decision.asks_for(PREEMPTED):
            self._save_and_end(trainer, decision.reason)
        else:
            self._warn(trainer, f"All ranks leave after this batch. {decision.reason}")
        # `min_epochs` and `min_steps` delay early stopping, and must not delay an explicit request.
        loop = trainer.fit_loop
        self._minimum = loop.min_epochs, loop.epoch_loop.min_steps
        loop.min_epochs = loop.epoch_loop.min_steps = None
        trainer.should_stop = True

    def _save_and_end(self, trainer: Any, reason: str) -> None:
        requeues = requeue_signal(trainer._accelerator_connector.cluster_environment)
        asks_slurm = requeues is not None and f"received {requeues.name}" in reason
        path = self._save(trainer, asks_slurm)
        if trainer.is_global_zero and "://" not in path:
            content = {"checkpoint": Path(path).name, "reason": reason}
            write_report(Path(path).with_name(PREEMPTED_FILE), json.dumps(content))
        if self._file is not None:
            self._file.remove()
        goes_on = f"resume from {path}"
        if asks_slurm and trainer.is_global_zero:  # rank 0 alone requeues the job and says so
            refused = requeue_job()
            goes_on = f"Slurm was asked to requeue the job, to resume from {path}"
            if refused is not None:
                goes_on = f"Slurm did not requeue the job ({refused}): submit it again, to resume from {path}"
        if self.exit_code is None:
            self._warn(trainer, f"All ranks leave after this batch; {goes_on}. {reason}")
            return
        self._warn(trainer, f"All ranks end here with exit code {self.exit_code}; {goes_on}. {reason}")
        outcome.expected_exit_code = self.exit_code
        raise Preempted(reason, self.exit_code, path)

    def _save(self, trainer: Any, asks_slurm: bool) -> str:
        folder = self.dirpath or getattr(trainer.checkpoint_callback, "dirpath", None)
        folder = folder or Path(trainer.default_root_dir, "checkpoints")
        chosen = str(Path(folder, f"{self.filename}.ckpt"))
        if asks_slurm:  # Lightning resumes from this path once Slurm has requeued the job
            chosen = str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
        path: str = current_communicator().broadcast(chosen)
        if asks_slurm:  # because Slurm may end this process while it requeues the job
            for logger in trainer.loggers:
                logger.finalize("finished")
        trainer.save_checkpoint(path)
        return path

    def _warn(self, trainer: Any, text: str) -> None:
        if trainer.is_global_zero:
            _log.warning("%s (epoch %d, optimizer step %d)", text, trainer.current_epoch, trainer.global_step)


def _completes_optimizer_step(trainer: Any) -> bool:
    """Return whether the batch that has just ended was the last one of its optimizer step."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if batches % trainer.accumulate_grad_batches == 0:
        return True
    is_last = batches >= trainer.num_training_batches
    return is_last and not trainer.strategy.handles_gradient_accumulation
