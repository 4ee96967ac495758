"""Ranks that are children of a process which is no rank itself: spawn, fork, forkserver, from notebooks too.

Torch starts and joins them. The ranks note how they end; when one ends badly the others get the grace period, and the
parent raises one error with the first failing rank's own traceback.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch.multiprocessing as mp
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_lockstep._lightning import (
    TrainerFn,
    _check_bad_cuda_fork,
    _check_missing_main_guard,
    _GlobalStateSnapshot,
    _MultiProcessingLauncher,
    find_free_network_port,
    move_data_to_device,
)
from lightning_lockstep._system import shell_exit_code
from lightning_lockstep.distributed import shut_down
from lightning_lockstep.distributed.failure.process_exit import (
    ExitReport,
    drop_what_nobody_reads,
    end_now,
    exit_plan,
    flush_everything,
    set_exit_report,
)
from lightning_lockstep.distributed.failure.record import (
    describe_error,
    describe_exit,
    failure_note,
    first_failure,
    keep_failure,
    note_failure,
)
from lightning_lockstep.distributed.process_group import forget_rendezvous, process_group_exists
from lightning_lockstep.distributed.rendezvous import token_for_children
from lightning_lockstep.errors import LaunchError, Preempted, RankFailedError
from lightning_lockstep.launchers.environments import LockstepEnvironment
from lightning_lockstep.launchers.rank_processes import SignalForwarding, end_with_parent
from lightning_lockstep.launchers.subprocess_script import runs_without_children

if TYPE_CHECKING:
    from lightning_lockstep.launchers.rank_supervisor import RankSupervisor

# -- Before a fork --
# A copy of a process has its memory and not its threads. What has started threads must be stopped first: OpenMP can be,
# CUDA and XLA cannot, so they must not have been used.

_PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5: end the threads, keep nothing


def leave_group_of_one() -> None:
    """Forget the process group of an earlier Trainer that ran in this process alone."""
    if process_group_exists():
        shut_down(destroy_process_group=True)
        gc.collect()
        forget_rendezvous()


def prepare_fork() -> None:
    """Stop what would not survive the fork and can be started again on both sides."""
    _check_bad_cuda_fork()
    leave_group_of_one()
    _end_openmp_threads()
    flush_everything()  # each rank would also write what is buffered


def _end_openmp_threads() -> None:
    """End the threads of GNU OpenMP, which starts new ones when it needs them."""
    # After a fork its record of them is there, the threads are not, and the first operation on several cores waits for
    # them forever. The libraries of Intel and LLVM need no help.
    loaded: list[Any] = []
    with suppress(psutil.Error, OSError, AttributeError):  # psutil has maps of memory on Linux
        loaded = psutil.Process().memory_maps()
    for path in {library.path for library in loaded if Path(library.path).name.startswith("libgomp")}:
        with suppress(OSError, AttributeError):  # of several, an old one cannot
            ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_HARD)


def in_kernel() -> bool:
    """Return whether this process is a kernel of IPython, or a rank that was forked from one."""
    if "ipykernel" not in sys.modules or "IPython" not in sys.modules:
        return False
    return getattr(sys.modules["IPython"].get_ipython(), "kernel", None) is not None


# -- What the parent raises for the rank that failed first --

_FOR_MEMORY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
_MEMORY = (
    "If the host ran out of memory, make the model once, in a cell, and pass it to the function: each rank makes what"
    " is made inside the function."
)


def _error_of_ranks(folder: Path, ended: mp.ProcessExitedException, group: RanksToStart) -> BaseException:
    """Return what the parent raises for ranks of which torch has seen one fail."""
    record, code = first_failure(folder), ended.exit_code
    # Ctrl-C goes to the ranks too, and torch may see them end before this process gets it.
    if code == _INTERRUPTED:
        return KeyboardInterrupt()
    if record is None or not failure_note(folder, ended.error_index).exists():
        # This rank has left no note. Where the run was, the note of another rank may tell.
        where, file = ({}, "") if record is None else (record.where, record.file)
        record = describe_exit(group.first_rank + ended.error_index, group.world_size, ended.error_pid, code)
        record = keep_failure(replace(record, where=where, file=file))
    if record.kind == "interrupt":
        return KeyboardInterrupt()
    advice = f"\n{_MEMORY}" if group.in_cell and -code in _FOR_MEMORY else ""
    report = record.report() + advice
    failed = record.error() if record.kind == "collective" else RankFailedError(report, record)
    set_exit_report(failed, ExitReport(f"\nlightning-lockstep: {report}\n", record.exit_code, replaces=True))
    return show_in_cell(failed, f"{type(failed).__name__}: {report}")


def show_in_cell(error: BaseException, text: str) -> BaseException:
    """Have IPython show ``text`` for ``error`` when nobody catches it, instead of the frames of the launch."""
    error._render_traceback_ = partial(str.splitlines, text)  # type: ignore[attr-defined]
    return error


# -- Runs a function in several ranks, and waits for them --

_ANSWER = "answer"  # a file of rank 0: what it returned, and the exit on which all ranks agreed, if any
_INTERRUPTED = shell_exit_code(-signal.SIGINT)  # exit code after Ctrl-C, where Lightning's own would be 1
_CTRL_C = 2.0  # how long ranks that a terminal's Ctrl-C has reached may take before they get it from here [s]
_KILLED = 5.0  # how long the operating system may take to end a killed process [s]


@dataclass(frozen=True, kw_only=True)
class RanksToStart:
    """The ranks to start on this host."""

    number: int
    start_method: str
    grace_period: float  # how long the others may take to end when one has failed [s]
    in_cell: bool  # whether they are started by a cell of a notebook
    first_rank: int = 0
    world_size: int


def run_in_ranks(
    group: RanksToStart,
    function: Callable[..., Any],  # called in every rank with its number on this host and args
    *args: Any,  # not copied by a fork: shared with this process until a rank writes into them
) -> Any:
    """Run ``function(local_rank, *args)`` in every rank, and return what rank 0 returned."""
    exit_plan.cancel_forced_exit()  # an earlier launch may have failed or been interrupted, and the program goes on
    drop_what_nobody_reads()  # multiprocessing flushes both streams, and would raise for one that nobody reads
    before = multiprocessing.active_children()
    ranks: Sequence[Any] = ()
    with tempfile.TemporaryDirectory(prefix="lockstep-") as name:
        folder = Path(name)
        given = group, folder, token_for_children(), function, args
        try:
            with _interrupt_held(group.in_cell):
                # Not Lightning's launch(): its queue holds a result until all have ended, so a large one blocks rank 0.
                context = mp.start_processes(  # type: ignore[no-untyped-call]
                    _be_rank, given, group.number, False, False, group.start_method
                )
                ranks = context.processes
            with SignalForwarding(partial(_send, ranks), partial(_send, ranks, signal.SIGKILL)):
                # Torch sends SIGTERM after the first half of it and SIGKILL after the second.
                while not context.join(grace_period=group.grace_period / 2):
                    pass
        except mp.ProcessExitedException as ended:
            raise _error_of_ranks(folder, ended, group) from None
        except KeyboardInterrupt:
            if not group.in_cell:
                exit_plan.force_exit_at_shutdown(_INTERRUPTED)
            _join(ranks, _CTRL_C)
            _send(ranks, signal.SIGINT)
            _join(ranks, group.grace_period)
            raise
        finally:  # also when the user interrupts once more, or not all could be started
            ranks = [one for one in multiprocessing.active_children() if one not in before]
            _send(ranks, signal.SIGKILL)
            _join(ranks, _KILLED)
        answer = folder / _ANSWER
        value, preempted = pickle.loads(answer.read_bytes()) if answer.exists() else (None, None)
        if preempted is not None:
            raise preempted  # this process, which is no rank, ends with the exit code on which the ranks agreed
        return value


@contextmanager
def _interrupt_held(in_cell: bool) -> Iterator[None]:
    """Raise the KeyboardInterrupt of a kernel that comes meanwhile at the end, when each forked rank is known."""
    # Elsewhere Ctrl-C also reaches the ranks, and they end with their parent, which a kernel outlives.
    if not in_cell or threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if arrived:
        raise KeyboardInterrupt


def _send(ranks: Sequence[Any], number: int) -> None:
    for process in ranks:
        if process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _join(ranks: Sequence[Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))


def _be_rank(
    local_rank: int, group: RanksToStart, folder: Path, token: dict[str, str], function: Any, args: Any
) -> None:
    """Run the function in a started rank, and note how it ended."""
    if group.in_cell:  # a fork of the kernel has its event loop, which signals would wake, and its handlers
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with_parent(parent.is_alive)
    os.environ.update(token)
    note = exit_plan.note = failure_note(folder, local_rank)
    try:
        try:
            answer: tuple[Any, Preempted | None] = function(local_rank, *args), None
        except Preempted as agreed:  # no failure: all ranks have left together on purpose
            answer = None, agreed
        if local_rank == 0:
            (folder / _ANSWER).write_bytes(pickle.dumps(move_data_to_device(answer, "cpu")))
    except KeyboardInterrupt:
        end_now(_INTERRUPTED)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0) and first_failure(folder) is None:
            return  # the program's own wish; during a fit it is a failure, and noted
        if not note.exists():  # the supervisor has not seen it
            note_failure(describe_error(error, group.first_rank + local_rank, group.world_size))
        drop_what_nobody_reads()
        if group.in_cell:
            end_now(1)  # the cell does not wait for threads that the function has left behind
        sys.exit(1)
    drop_what_nobody_reads()


# -- The launcher of strategies --


class SpawnedLauncher(_MultiProcessingLauncher):
    """Starts the ranks of this node by multiprocessing and joins them."""

    _strategy: Any  # Lightning's annotation names a base that knows no numbers of processes and nodes

    def __init__(self, strategy: Any, start_method: Any) -> None:
        super().__init__(strategy, start_method=start_method)  # the strategy travels to the ranks
        self._supervisor: RankSupervisor = strategy.supervisor

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run ``function`` in every rank and return what rank 0 returned."""
        in_cell = self._start_method == "fork" and in_kernel()
        if self._start_method == "spawn":
            _check_missing_main_guard()
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise LaunchError(
                f"Trainer.fit() was called twice on one Trainer whose ranks are started by"
                f" {self._start_method!r}: the optimizer's state stayed in the ranks of the first call."
                " Make a new Trainer and pass ckpt_path=..., or use start_method='popen'."
            )
        runs_without_children()
        # Before the port is chosen: an earlier Trainer of one rank may have left its own.
        leave_group_of_one() if self._start_method == "spawn" else prepare_fork()
        strategy, environment = self._strategy, self._strategy.cluster_environment
        environment.validate_settings(strategy.num_processes, strategy.num_nodes)
        if isinstance(environment, LockstepEnvironment) and "MASTER_PORT" not in os.environ:
            environment.adopt_port(find_free_network_port())
        group = RanksToStart(
            number=strategy.num_processes,
            start_method=self._start_method,
            grace_period=self._supervisor.settings.grace_period,
            in_cell=in_cell,
            first_rank=environment.node_rank() * strategy.num_processes,
            world_size=strategy.num_processes * strategy.num_nodes,
        )
        snapshot = _GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
        output = run_in_ranks(group, self._in_rank, trainer, function, args, kwargs, snapshot)
        if trainer is None or output is None:  # None: the ranks have ended by sys.exit()
            return output
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._recover_results_in_main_process(output, trainer)
        if output.weights_path is not None:  # Lightning removes the file of the weights, not its folder
            with suppress(OSError):
                Path(output.weights_path).parent.rmdir()
        return output.trainer_results

    def _in_rank(self, local_rank: int, trainer: Any, function: Any, args: Any, kwargs: Any, snapshot: Any) -> Any:
        """Run in a started rank: as Lightning does, under the supervisor."""
        self._supervisor.attach(trainer)
        _unshare_metrics(None if trainer is None else trainer.lightning_module)
        supervised = partial(self._supervisor.run, function)
        answers: queue.Queue[Any] = queue.Queue()
        self._wrapping_function(local_rank, trainer, supervised, args, kwargs, answers, snapshot)
        return None if answers.empty() else answers.get()


def _unshare_metrics(module: nn.Module | None) -> None:
    """Give this rank its own states of metrics: spawned ranks would all add to the same memory."""
    # Lightning does so with parameters and buffers, which these are not.
    for metric in module.modules() if module is not None else ():
        if isinstance(metric, Metric):
            for name, state in metric.metric_state.items():
                if isinstance(state, Tensor):
                    setattr(metric, name, state.clone())
