"""All ranks leave after the same batch, whichever of them wants to."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_lockstep._settings import Faults
from lightning_lockstep._system import write_report
from lightning_lockstep.callbacks.ends_with_run import EndsWithRun
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.checkpoint_folder import PREEMPTED_FILE
from lightning_lockstep.distributed.coordination.stop_agreement import StepAgreement, StopDecision
from lightning_lockstep.distributed.failure.process_exit import exit_plan
from lightning_lockstep.distributed.process_group import current_group
from lightning_lockstep.errors import Preempted
from lightning_lockstep.launchers.environments import requeue_job, requeue_signal
from lightning_lockstep.loaders.loader_position import LoaderPosition
from lightning_lockstep.steps.patching import replaced

_log = logging.getLogger(__name__)

# -- The two functions with which user code asks all ranks to leave, and finds out that they do --

_process = os.getpid()
_active: StepAgreement | None = None
_early_requests: list[str] = []
_lock = threading.RLock()


def set_breakpoint(reason: str = "a breakpoint was set") -> None:
    """Ask all ranks to leave their training loop together, after the same batch.

    Can be called anywhere in the main process of a rank: in a ``training_step``, a callback, a dataset without
    workers, another thread. In a fit, the callback :class:`StopTogether` acts on it; in your own loop,
    :func:`check_breakpoint` does.

    Args:
        reason: Why; every rank receives it, with the number of this one.

    Ranks: any rank, alone. One message to rank 0; does not wait. Before the ranks are connected the
    request is kept until they are.
    """
    if os.getpid() != _process and _active is not None and _active.channel.world_size > 1:
        _log.warning(
            "set_breakpoint(%r) was called in a worker process, which has no link to the other ranks, and has"
            " no effect there; call it in the rank's own process",
            reason,
        )
        return
    with _lock:
        if _active is not None and _is_current(_active):
            _active.request(str(reason))
        else:
            _early_requests.append(str(reason))


def check_breakpoint(*, reset: bool = False) -> StopDecision | None:
    """Return the breakpoint on which all ranks have agreed, or ``None``.

    After a ``fit`` with :class:`StopTogether`, or during one, it only returns the decision. In your own loop it
    is the point at which all ranks leave: call it on every rank after every batch.

        for batch in loader:
            ...
            if check_breakpoint():
                break

    Args:
        reset: Forget the breakpoint once it was returned, so that the ranks can agree on another one. Pass the
            same value on every rank.

    Returns:
        Who asked and why, equal on every rank, from the agreed batch on; ``None`` before.

    Ranks: every rank, after every batch. Costs about a microsecond without a request.
    """
    agreement = _active
    if agreement is None or not _is_current(agreement):
        agreement = connect()
    decision = agreement.decision
    if decision is None and not agreement.in_fit:
        decision = agreement.passed()
    if decision is not None and reset and not agreement.in_fit:
        agreement.start_over()
    return decision


def connect() -> StepAgreement:  # on every rank, the first time
    """Return the agreement of the current process group, and pass on what was requested before it existed."""
    global _active, _process
    agreement = current_communicator().side_channel.get_or_create(StepAgreement)
    with _lock:
        _active, _process = agreement, os.getpid()
        while _early_requests:
            agreement.request(_early_requests.pop(0))
    return agreement


def _is_current(agreement: StepAgreement) -> bool:
    group, channel = current_group(), agreement.channel
    return channel.usable and channel.world_size == (1 if group is None else group.world_size)


# -- The callback --

PREEMPTED = "preempted"
_LOOK_EVERY = 1.0  # between two looks for the stop file [s]


class StopTogether(EndsWithRun):
    """Ends a fit on all ranks after the same batch, when any rank asks for it.

    After :func:`set_breakpoint` on any rank ``fit`` returns. After a signal or a stop file a checkpoint is saved first,
    and every rank ends with ``exit_code``. With gradient accumulation all ranks stop after the batch that completes
    the optimizer step.

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
        known = {s.name for s in signal.Signals} - {"SIGKILL", "SIGSTOP"}
        expected = "a list of signals that can be caught, such as ['SIGTERM', 'SIGUSR1']"
        faults.list_of("signals", signals, lambda name: name in known, expected)
        faults.whole("exit_code", exit_code, least=0, most=255, optional=True)
        is_name = isinstance(filename, str) and bool(filename) and "/" not in filename
        faults.check(is_name, "filename", filename, "a name without a folder, such as 'preempted'")
        faults.raise_all()
        self.signals, self.stop_file, self.exit_code = tuple(signals), stop_file, exit_code
        self.dirpath, self.filename = dirpath, filename
        self.decision: StopDecision | None = None
        self._agreement: StepAgreement  # of this fit

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Connect to the other ranks and begin to count batches from zero. Ranks: all, together."""
        if stage != "fit":
            return
        self.at_end.close()
        self.decision, self._leaves = None, False
        self._agreement = connect()
        self._agreement.start_over(keep_requests=True)
        self.at_end.enter_context(replaced(self._agreement, in_fit=True))
        LoaderPosition.attach(trainer)  # strategies of this package have done so
        looks = self.stop_file is not None and trainer.local_rank == 0
        self._stop_file = Path(trainer.default_root_dir, str(self.stop_file)) if looks else None
        self._found_file, self._looked = False, -math.inf

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Note whose signal handlers there are, before Lightning sets its own."""
        requeues = requeue_signal(trainer._accelerator_connector.cluster_environment)
        numbers = {*(signal.Signals[name] for name in self.signals), *([requeues] if requeues else [])}
        self._handlers_of_user = {number: signal.getsignal(number) for number in sorted(numbers)}
        self._handlers_before: dict[signal.Signals, Any] = {}  # that this callback has replaced
        self._received: set[signal.Signals] = set()
        self.at_end.callback(self._restore_signals)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over the signals; Lightning has set its own handlers just before. Without a check, before training."""
        if self._handlers_before or threading.current_thread() is not threading.main_thread():
            return
        for number in self._handlers_of_user:
            self._handlers_before[number] = signal.signal(number, self._on_signal)

    on_train_start = on_sanity_check_start

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Leave if all ranks leave after this batch. Ranks: every rank, after every batch."""
        self._look_for_file()
        self.decision = self._agreement.passed() or self.decision
        # In the middle of an optimizer step the accumulated gradients would be lost.
        if self.decision is not None and not trainer.fit_loop._should_accumulate():
            self._leave(trainer, self.decision)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Put signal handlers back, and act on a signal after the last batch. Ranks: all, together; one reduction."""
        self._restore_signals()
        unanswered = self._agreement.unanswered(PREEMPTED)
        agreed = current_communicator().agree(bool(unanswered), "; ".join(unanswered))
        if agreed:
            self._agreement.start_over()  # the requests are answered, and must not stop the next fit
            self._save_and_end(trainer, "; ".join(f"rank {rank}: {why}" for rank, why in agreed.items()))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Lightning answers a SIGTERM with a broadcast from inside the handler, which pairs up with whatever collective
        # the other ranks are in. This handler only makes a request, and calls the user's own.
        known = signal.Signals(number)
        if known not in self._received:  # schedulers repeat themselves
            self._received.add(known)
            self._preempt(f"received {known.name}")
        handler = self._handlers_of_user[known]
        if callable(handler):
            handler(number, frame)

    def _restore_signals(self) -> None:
        for number, handler in self._handlers_before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._handlers_before.clear()

    def _look_for_file(self) -> None:
        if self._stop_file is None or self._found_file or time.monotonic() - self._looked < _LOOK_EVERY:
            return
        self._looked = time.monotonic()
        # Network disks answer EACCES, EIO or ESTALE for a while, which counts as no file, and `Path.exists` raises.
        self._found_file = os.path.exists(self._stop_file)  # noqa: PTH110
        if self._found_file:
            self._preempt(f"found the stop file {self._stop_file}")

    def _preempt(self, reason: str) -> None:
        self._agreement.request(reason, kind=PREEMPTED)

    def _leave(self, trainer: Any, decision: StopDecision) -> None:
        """Leave after this batch; all ranks are here, with the same decision."""
        if trainer.should_stop and self._leaves:
            return
        if decision.asks_for(PREEMPTED):
            self._save_and_end(trainer, decision.reason)
        else:
            self._warn(trainer, f"All ranks leave after this batch. {decision.reason}")
        # `min_epochs` and `min_steps` delay early stopping, and must not delay an explicit request.
        loop = trainer.fit_loop
        self.at_end.enter_context(replaced(loop, min_epochs=None))
        self.at_end.enter_context(replaced(loop.epoch_loop, min_steps=None))
        self._leaves = trainer.should_stop = True

    def _save_and_end(self, trainer: Any, reason: str) -> None:
        requeues = requeue_signal(trainer._accelerator_connector.cluster_environment)
        asks_slurm = requeues is not None and f"received {requeues.name}" in reason
        path = self._save(trainer, asks_slurm)
        if trainer.is_global_zero and "://" not in path:
            content = {"checkpoint": Path(path).name, "reason": reason}
            write_report(Path(path).with_name(PREEMPTED_FILE), json.dumps(content))
        if self._stop_file is not None and self._found_file:  # else the resumed run would stop again
            with suppress(OSError):
                self._stop_file.unlink()
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
        exit_plan.expected_exit_code = self.exit_code
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
