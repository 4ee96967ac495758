"""Ranks that are children of a process which is no rank itself: spawn, fork, forkserver, from notebooks too.

The parent waits for all of them. When one ends badly it gives the others the grace period, reads the notes that the
ranks left at their end, and raises one error with the first failing rank's own traceback.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import ismethod
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.multiprocessing as mp
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_lockstep import _system
from lightning_lockstep._lightning import (
    Trainer,
    TrainerFn,
    _check_bad_cuda_fork,
    _check_missing_main_guard,
    _GlobalStateSnapshot,
    _MultiProcessingLauncher,
    move_data_to_device,
)
from lightning_lockstep._system import write_whole
from lightning_lockstep._text import say
from lightning_lockstep.distributed.failure.exit_notes import (
    first_failure,
    keep_failure,
    keep_notes_in,
    note_preempted_exit,
    preempted_exit,
)
from lightning_lockstep.distributed.failure.process_exit import (
    drop_what_nobody_reads,
    end_now,
    error_from_bytes,
    error_to_bytes,
    outcome,
    show_plainly,
)
from lightning_lockstep.distributed.failure.record import (
    FailureRecord,
    describe_error,
    describe_exit,
    format_error,
    is_broken_collective,
)
from lightning_lockstep.distributed.process_group import free_port
from lightning_lockstep.distributed.rendezvous import token_for_children
from lightning_lockstep.errors import LaunchError, LockstepError, Preempted, RankFailedError
from lightning_lockstep.launchers.environments import LockstepEnvironment
from lightning_lockstep.launchers.notebook import (
    RankOutput,
    begin_rank,
    check_kernel,
    in_kernel,
    leave_group_of_one,
    prepare_fork,
)
from lightning_lockstep.launchers.rank_processes import SAY_AFTER, BadEnd, RankProcesses, end_with_parent
from lightning_lockstep.launchers.subprocess_script import runs_without_children

if TYPE_CHECKING:
    from lightning_lockstep.launchers.rank_supervisor import RankSupervisor

# -- What a rank notes of the error it ends with, and what the parent raises for it --

OUT_OF_MEMORY = "out of host memory; declare the model in a cell outside and pass it in"
# Signals by which a process ends that gets no memory; which one depends on who noticed it first.
_FOR_MEMORY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
_SHORT = 0.02  # share of the memory below which what is left is too little for a rank


class MemoryWatch:
    """Tells whether the memory of this host ran out while the ranks were running."""

    def __init__(self) -> None:
        self._kills = _system.kills_for_memory()
        self._limit, _ = _system.memory_limit()
        self._least = self._limit

    def look(self) -> None:
        """Note how much memory is left; to be called now and then."""
        self._least = min(self._least, _system.memory_left())

    def explains(self, returncode: int) -> bool:  # returncode: negative for a signal
        """Return whether a rank that ended with this code was killed because memory ran out."""
        if -returncode not in _FOR_MEMORY:
            return False
        kills = _system.kills_for_memory()
        killed = -returncode == signal.SIGKILL and None not in (kills, self._kills) and kills != self._kills
        return killed or self._least < self._limit * _SHORT


def _note_raised(folder: Path, error: BaseException, *, rank: int, world_size: int) -> None:
    """Note the error with which this rank ends, the record that is printed of it and the error itself."""
    while (trace := error.__traceback__) is not None and trace.tb_next is not None:
        if not trace.tb_frame.f_globals.get("__name__", "").startswith("lightning_lockstep."):
            break
        error.__traceback__ = trace.tb_next  # without the frames of the launch
    record = describe_error(error, rank, world_size, dict)
    note = time.time(), record.to_json(), error_to_bytes(error)
    write_whole(folder / f"{rank}.raised", pickle.dumps(note))


def _raised(folder: Path) -> list[tuple[FailureRecord, bytes]]:
    """Return what the ranks noted, the first one first."""
    notes = sorted(pickle.loads(file.read_bytes()) for file in folder.glob("*.raised"))
    return [(FailureRecord.from_json(record), error) for _, record, error in notes]


def _error_of_ranks(
    folder: Path, ended: Sequence[BadEnd], group: RanksToStart, memory: MemoryWatch
) -> BaseException:
    """Return what the parent raises for ranks that failed together with the first one."""
    # An error that every rank has raised is that error. For any other the first rank that failed is
    # named, with its own traceback.
    raised, noted = _raised(folder), first_failure(folder)  # noted: by ranks that had met
    killed = [end for end in ended if end.returncode < 0]
    if not killed and len(raised) == group.number and len({record.summary for record, _ in raised}) == 1:
        record, error = min(raised, key=lambda note: note[0].rank)
        text = f"{record.traceback.rstrip()}\n\nAll {group.number} ranks raised this too."
        text += f"\n{noted.saved_to()}" if noted is not None and noted.file else ""
        alike = error_from_bytes(error)
        if noted is None or not isinstance(alike, SystemExit):  # Python would print nothing of that
            return show_in_cell(alike, text)
    if killed:  # what the others raise is a consequence of that
        record = _record_of_end(killed[0], group, memory)
        if noted is not None:  # the ranks know less of that end, and more of the run
            record = keep_failure(replace(record, where=noted.where, file=noted.file))
    else:
        records = [record for record, _ in raised]
        own = [record for record in records if not _is_consequence(record)] or records
        known = [noted] if noted else own
        record = known[0] if known else _record_of_end(ended[0], group, memory)
    if record.kind == "interrupt":
        return KeyboardInterrupt()
    failed = RankFailedError(record.report(), record)
    show_plainly(failed, record.exit_code)
    return show_in_cell(failed, f"RankFailedError: {failed}")


def _is_consequence(record: FailureRecord) -> bool:
    """Return whether a rank has raised this because another had ended."""
    kind, _, text = record.summary.partition(": ")
    return kind == RankFailedError.__name__ or is_broken_collective(RuntimeError(text))


def _record_of_end(end: BadEnd, group: RanksToStart, memory: MemoryWatch) -> FailureRecord:
    """Return the record of a rank that ended without reporting an error, out of memory or not."""
    kind, summary, code = describe_exit(end.returncode)
    if memory.explains(end.returncode):
        summary = OUT_OF_MEMORY
    rank, host = group.first_rank + end.rank, socket.gethostname()
    return FailureRecord(rank, group.world_size, host, end.pid, kind, summary, exit_code=code)


@contextmanager
def plainly_in_cell() -> Iterator[None]:
    """Have IPython show errors of this package, and an interrupt, without the frames of the launch."""
    __tracebackhide__ = True
    try:
        yield
    except KeyboardInterrupt as error:
        raise show_in_cell(error, "KeyboardInterrupt: all ranks have ended.") from None
    except LockstepError as error:
        if not hasattr(error, "_render_traceback_"):
            show_in_cell(error, format_error(error))
        raise


def show_in_cell(error: BaseException, text: str) -> BaseException:
    """Have IPython show ``text`` for ``error`` when nobody catches it, instead of the frames of the launch."""
    error._render_traceback_ = partial(str.splitlines, text)  # type: ignore[attr-defined]
    return error


# -- Runs a function in several ranks, and waits for them --

_RESULT = "result"
_INTERRUPTED = 130  # exit code after Ctrl-C, where Lightning's own would be 1


@dataclass(frozen=True, kw_only=True)
class RanksToStart:
    """The ranks to start on this host."""

    number: int
    start_method: str
    grace_period: float  # how long the others may take to end when one has failed [s]
    in_cell: bool  # whether what they print is shown by this process, in the order of the ranks
    environment: Mapping[str, str]
    first_rank: int = 0
    world_size: int


def run_in_ranks(
    group: RanksToStart,
    function: Callable[..., Any],  # called in every rank with its number on this host and args
    *args: Any,  # not copied by a fork: shared with this process until a rank writes into them
) -> Any:
    """Run ``function(local_rank, *args)`` in every rank, and return what rank 0 returned."""
    outcome.cancel_forced_exit()  # an earlier launch may have failed or been interrupted, and the program goes on
    drop_what_nobody_reads()  # multiprocessing flushes both streams, and would raise for one that nobody reads
    memory = MemoryWatch()
    with tempfile.TemporaryDirectory(prefix="lockstep-") as name:
        folder = Path(name)
        output = RankOutput(folder, group.number) if group.in_cell else None

        returned: list[float] = []  # when rank 0 was seen to have returned, until that was said

        def between() -> None:
            memory.look()
            if not returned and (folder / _RESULT).exists():
                returned.append(time.monotonic())
            if returned and time.monotonic() - returned[0] > SAY_AFTER:
                returned[0] = math.inf
                ranks.say_who_runs()
            if output is not None:
                output.show(ranks.running())

        def start(rank: int) -> Any:
            context: Any = mp.get_context(group.start_method)
            process = context.Process(target=_be_rank, args=(rank, group, folder, function, args))
            with _named_if_unpicklable(args, group.start_method):
                process.start()
            return process

        ranks = RankProcesses(between=between)
        try:
            ranks.start(start, group.number)
            if bad := ranks.wait_or_stop(group.grace_period):
                raise _error_of_ranks(folder, bad, group, memory)
        except KeyboardInterrupt:
            if not group.in_cell:
                outcome.force_exit_at_shutdown(_INTERRUPTED)
            ranks.interrupt(group.grace_period)
            raise
        finally:
            ranks.kill()
            if output is not None:
                output.close()
        preempted = preempted_exit(folder)
        if preempted is not None:
            raise preempted
        result = folder / _RESULT
        return pickle.loads(result.read_bytes()) if result.exists() else None


@contextmanager
def _named_if_unpicklable(args: tuple[Any, ...], start_method: str) -> Iterator[None]:
    """Say, where arguments cannot be pickled for a rank, which part of which object it is."""
    try:
        yield
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        if start_method == "fork":  # nothing is pickled for it
            raise
        raise LaunchError(
            f"{_unpicklable_part(args)} cannot be pickled ({type(error).__name__}: {error}), and ranks that are started"
            f" by {start_method!r} get copies of the Trainer and of all that it is given. Make it on each rank, in"
            " setup(), or replace a lambda or an inner function by one of the file, or use strategy='lockstep_ddp',"
            " which runs the script again."
        ) from None


def _unpicklable_part(args: tuple[Any, ...]) -> str:
    flat = [part for one in args for part in (one if isinstance(one, tuple) else (one,))]
    # What the program has given to the Trainer comes first: the Trainer, whose method the function is, holds that too.
    flat.sort(key=lambda one: (ismethod(one), isinstance(one, Trainer)))
    found = (_unpicklable(one, type(one).__name__, set()) for one in flat)
    return next(filter(None, found), "What the ranks are to be given")


def _unpicklable(value: Any, name: str, seen: set[int]) -> str | None:
    """Return the name of the innermost part of a value that cannot be pickled, or ``None`` if all of it can."""
    if id(value) in seen:
        return None
    seen.add(id(value))
    with suppress(Exception):  # whatever a user's class makes of it
        ForkingPickler.dumps(value)
        return None
    for part, inner in _parts(value):
        if found := _unpicklable(inner, name + part, seen):
            return found
    return name


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", inner) for place, inner in enumerate(value))
    elif (
        hasattr(value, "__dict__")
        and not isinstance(value, type)
        and not callable(getattr(value, "__get__", None))
    ):
        if isinstance(value, nn.Module):
            yield from ((f".{name}", child) for name, child in value.named_children())
        own = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
        yield from ((f".{name}", inner) for name, inner in (own.items() if isinstance(own, dict) else ()))


def _be_rank(local_rank: int, group: RanksToStart, folder: Path, function: Any, args: Any) -> None:
    """Run the function in a started rank, and note how it ended."""
    if group.in_cell:
        begin_rank(local_rank, folder)
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with_parent(parent.is_alive)
    os.environ.update(group.environment)
    keep_notes_in(folder)
    try:
        value = function(local_rank, *args)
        if local_rank == 0:
            _keep_result(folder, value)
    except KeyboardInterrupt:
        end_now(_INTERRUPTED)
    except Preempted as preempted:
        # No failure: the parent, which is no rank, ends with the exit code on which the ranks agreed.
        note_preempted_exit(preempted)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0) and first_failure(folder) is None:
            return  # the program's own wish; during a fit it is a failure, and noted
        if not isinstance(error, RankFailedError):  # that one was noted when it arrived
            _note_raised(folder, error, rank=group.first_rank + local_rank, world_size=group.world_size)
        drop_what_nobody_reads()
        if group.in_cell:
            end_now(1)  # the cell does not wait for threads that the function has left behind
        sys.exit(1)
    drop_what_nobody_reads()


def _keep_result(folder: Path, value: Any) -> None:
    """Keep what the function returned for the parent, tensors on the CPU."""
    try:
        why = write_whole(folder / _RESULT, pickle.dumps(move_data_to_device(value, "cpu")))
        if why is not None:
            raise OSError(why)
    except Exception as error:  # whatever a user's class makes of its pickle
        say(
            f"lightning-lockstep: rank 0 returned a {type(value).__name__}, which cannot be sent to the kernel"
            f" ({type(error).__name__}: {error}), so None is returned there. Return what can be pickled, such as a"
            " dict of metrics or a state_dict()."
        )


# -- The launcher of strategies --


class SpawnedLauncher(_MultiProcessingLauncher):
    """Starts the ranks of this node by multiprocessing and joins them."""

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
        in_cell = self._start_method == "fork" and in_kernel()
        self._check(trainer, in_cell=in_cell)
        runs_without_children(self._supervisor)
        # Before the port is chosen: an earlier Trainer of one rank may have left its own.
        prepare_fork() if self._start_method == "fork" else leave_group_of_one()
        strategy, environment = self._strategy, self._strategy.cluster_environment
        if isinstance(environment, LockstepEnvironment) and "MASTER_PORT" not in os.environ:
            environment.adopt_port(free_port())
        group = RanksToStart(
            number=strategy.num_processes,
            start_method=self._start_method,
            grace_period=self._supervisor.settings.grace_period,
            in_cell=in_cell,
            environment=token_for_children(),
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

    def _check(self, trainer: Any, *, in_cell: bool) -> None:
        if in_cell:
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

    def _in_rank(
        self, local_rank: int, trainer: Any, function: Any, args: Any, kwargs: Any, snapshot: Any
    ) -> Any:
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
