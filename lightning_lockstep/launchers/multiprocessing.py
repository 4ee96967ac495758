"""Starts the ranks of this node as children of a process that is no rank itself: spawn, fork, forkserver.

The parent waits for all of them. When one ends badly it reads the notes that the ranks left at their exit, gives
the others the grace period, and raises one error with the first failing rank's own traceback.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.multiprocessing as mp

from lightning_lockstep._doors.lightning import (
    TrainerFn,
    _check_bad_cuda_fork,
    _check_missing_main_guard,
    _GlobalStateSnapshot,
    _MultiProcessingLauncher,
)
from lightning_lockstep.distributed.failure.process_exit import (
    drop_what_nobody_reads,
    end_now,
    leave_without_waiting,
    stay,
)
from lightning_lockstep.distributed.failure.record import (
    agreed_exit,
    first_failure,
    keep_notes_in,
    note_agreed_exit,
)
from lightning_lockstep.distributed.failure.uncaught import show_plainly
from lightning_lockstep.distributed.process_group import free_port
from lightning_lockstep.distributed.rendezvous import token_for_children
from lightning_lockstep.errors import LaunchError, Preempted, RankFailedError
from lightning_lockstep.launchers.environments import LockstepEnvironment
from lightning_lockstep.launchers.notebook_output import RankOutput, begin_rank, in_kernel
from lightning_lockstep.launchers.notebook_ranks import (
    MemoryWatch,
    check_kernel,
    prepare_fork,
    record_of_end,
    show_in_cell,
)
from lightning_lockstep.launchers.rank_processes import BadEnd, SignalForwarding, end_with_parent

if TYPE_CHECKING:
    from lightning_lockstep.launchers.rank_supervisor import RankSupervisor


_IN_CELL = 0.1  # how often the cell of a notebook shows what has come [s]
_PERIOD = 1.0  # how often the parent looks whether its ranks end in time after a signal [s]
_INTERRUPTED = 130  # exit code after Ctrl-C, where Lightning's own would be 1
_CTRL_C = 2.0  # how long ranks that a terminal's Ctrl-C has reached may take before they get it from here [s]


class SpawnedLauncher(_MultiProcessingLauncher):
    """Starts ranks with :mod:`torch.multiprocessing` and joins them."""

    _strategy: Any  # Lightning's annotation names a base that knows no numbers of processes and nodes

    def __init__(
        self,
        strategy: Any,  # travels to the ranks
        supervisor: RankSupervisor,
        *,
        start_method: Literal["spawn", "fork", "forkserver"],
    ) -> None:
        super().__init__(strategy, start_method=start_method)
        self._supervisor = supervisor

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run ``function`` in every rank and return what rank 0 returned."""
        self._check(trainer)
        if self._start_method == "fork":
            prepare_fork()
        self._memory = MemoryWatch()
        stay()  # an earlier launch may have been interrupted, and the program goes on
        drop_what_nobody_reads()  # multiprocessing flushes both streams, and would raise for one that nobody reads
        environment = self._strategy.cluster_environment
        if isinstance(environment, LockstepEnvironment) and "MASTER_PORT" not in os.environ:
            environment.adopt_port(free_port())
        snapshot = _GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
        answers = mp.get_context(self._start_method).SimpleQueue()
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, self._output(Path(folder)) as output:
            context = mp.start_processes(  # type: ignore[no-untyped-call]
                self._in_rank,
                args=(folder, token_for_children(), trainer, function, args, kwargs, answers, snapshot),
                nprocs=self._strategy.num_processes,
                start_method=self._start_method,
                join=False,
            )
            self.procs = context.processes
            try:
                self._join(context, Path(folder), output)
            finally:
                for file in context.error_files:  # torch leaves them behind
                    Path(file).unlink(missing_ok=True)
            preempted = agreed_exit(Path(folder))
            if preempted is not None:
                raise preempted
        output = answers.get()
        if trainer is None:
            return output
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._recover_results_in_main_process(output, trainer)
        if output.weights_path is not None:  # Lightning removes the file of the weights, not its folder
            with suppress(OSError):
                Path(output.weights_path).parent.rmdir()
        return output.trainer_results

    def _check(self, trainer: Any) -> None:
        if self._from_kernel:
            check_kernel()
        elif self._start_method in ("fork", "forkserver"):
            _check_bad_cuda_fork()
        if self._start_method == "spawn":
            _check_missing_main_guard()
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise LaunchError(
                f"Trainer.fit() was called twice on one Trainer whose ranks are started by"
                f" {self._start_method!r}: the optimizer's state stayed in the ranks of the first call."
                " Make a new Trainer and pass ckpt_path=..., or use start_method='popen'."
            )

    def _output(self, folder: Path) -> Any:
        """Return what shows in the cell of a notebook what the ranks print; elsewhere they print by themselves."""
        if not self._from_kernel:
            return nullcontext()

        def has_ended(rank: int) -> bool:
            return bool(self.procs[rank].exitcode is not None)

        return RankOutput(folder, self._strategy.num_processes, has_ended=has_ended)

    @property
    def _from_kernel(self) -> bool:
        return self._start_method == "fork" and in_kernel()

    def _join(self, context: Any, folder: Path, output: RankOutput | None) -> None:
        grace = self._supervisor.settings.grace_period
        try:
            with SignalForwarding(self.kill, functools.partial(self.kill, signal.SIGKILL)) as signals:
                while not context.join(timeout=_IN_CELL if output else _PERIOD, grace_period=grace / 2):
                    signals.check()
                    self._memory.look()
                    if output:
                        output.show()
        except KeyboardInterrupt:
            self._end_interrupted(grace)
            if output:  # the program goes on
                stay()
            raise
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise self._first_failure(error, context, folder) from None

    def _end_interrupted(self, grace: float) -> None:
        """End the ranks after Ctrl-C: the terminal's has reached them, one that was sent to this process has not."""
        leave_without_waiting(_INTERRUPTED)
        for patience, number in ((_CTRL_C, signal.SIGINT), (grace, signal.SIGKILL)):
            deadline = time.monotonic() + patience
            for process in self.procs:
                process.join(max(0.0, deadline - time.monotonic()))
            self.kill(number)

    def _first_failure(
        self, error: mp.ProcessRaisedException | mp.ProcessExitedException, context: Any, folder: Path
    ) -> BaseException:
        process = context.processes[error.error_index]
        killed = (process.exitcode or 0) < 0
        noted = None if killed else first_failure(folder)  # what the others note is a consequence of a kill
        if noted is not None:
            record = noted
        elif isinstance(error, mp.ProcessExitedException):
            world = self._strategy.num_processes * self._strategy.num_nodes
            end = BadEnd(error.error_index, process.pid, process.exitcode or 0, time.monotonic())
            record = record_of_end(end, world, self._memory)
        else:
            return error  # raised before the ranks had met: its text has the rank's traceback
        if record.kind == "interrupt":
            leave_without_waiting(_INTERRUPTED)
            return KeyboardInterrupt()
        failed = RankFailedError(record.report(), record)
        show_plainly(failed, record.exit_code)
        return show_in_cell(failed, f"RankFailedError: {failed}")

    def _in_rank(
        self, process_idx: int, folder: str, token: dict[str, str], trainer: Any, function: Any, *rest: Any
    ) -> None:
        """Run in a started rank: as Lightning does, under the supervisor."""
        args, kwargs, answers, snapshot = rest
        if self._from_kernel:
            begin_rank(process_idx, Path(folder))
        end_with_parent()
        os.environ.update(token)
        self._supervisor.attach(trainer)
        self._supervisor.parent_prints = True
        keep_notes_in(Path(folder))

        def supervised(*a: Any, **k: Any) -> Any:
            return self._supervisor.run(function, *a, **k)

        try:
            self._wrapping_function(process_idx, trainer, supervised, args, kwargs, answers, snapshot)
        except KeyboardInterrupt:
            # Torch's wrapper would turn this into a success, and the parent would wait for an answer.
            end_now(_INTERRUPTED)
        except Preempted as preempted:
            # No failure: the parent, which is no rank, ends with the exit code on which the ranks agreed.
            note_agreed_exit(preempted)
        drop_what_nobody_reads()
