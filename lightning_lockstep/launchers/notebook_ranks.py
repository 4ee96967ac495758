"""Ranks forked from a notebook: what must hold before, how they are started, how their failures are told."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_lockstep import _system
from lightning_lockstep._doors.lightning import move_data_to_device, rank_zero_only
from lightning_lockstep._system import write_whole
from lightning_lockstep._text import say
from lightning_lockstep.distributed import shut_down
from lightning_lockstep.distributed.failure.process_exit import end_now, stay
from lightning_lockstep.distributed.failure.record import (
    FailureRecord,
    agreed_exit,
    describe_error,
    describe_exit,
    first_failure,
    format_error,
    is_broken_collective,
    keep_notes_in,
    note_agreed_exit,
)
from lightning_lockstep.distributed.failure.uncaught import error_from_bytes, error_to_bytes, show_plainly
from lightning_lockstep.distributed.process_group import (
    current_group,
    forget_rendezvous,
    free_port,
    process_group_exists,
)
from lightning_lockstep.distributed.rendezvous import token_for_children
from lightning_lockstep.errors import LaunchError, LockstepError, Preempted, RankFailedError
from lightning_lockstep.launchers.notebook_output import RankOutput, begin_rank
from lightning_lockstep.launchers.rank_processes import BadEnd, RankProcesses, end_with_parent
from lightning_lockstep.launchers.rank_supervisor import apply_threads, notebook_rank

# -- What is checked and put in order in the kernel of a notebook before its process is forked into ranks
# A fork copies memory, not threads. Whatever works with threads of its own must not have been started, or
# must be stopped before: CUDA cannot, XLA cannot, OpenMP can.

_PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5: end the threads, keep nothing
_MAPS = Path("/proc/self/maps")


def check_kernel() -> None:
    """Refuse to fork a kernel whose copies could not work."""
    if notebook_rank() is not None:
        raise LaunchError(
            "Ranks were to be started inside a rank that a notebook has started: expected a call in a cell. Inside a"
            " rank make a Trainer with as many devices as there are ranks; it uses the ranks that are there."
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise LaunchError(
            "CUDA was already used in this kernel, so it would not work in ranks that are forked from it: expected no"
            " call of torch.cuda, no tensor and no model on a GPU in any cell before. Restart the kernel, run the"
            " cells that need no GPU, and do the rest inside the function that the ranks run."
        )
    group = current_group()
    if process_group_exists() and group is not None and group.world_size > 1:
        raise LaunchError(
            f"This kernel is itself rank {group.rank} of {group.world_size} connected ranks: expected a kernel that is"
            " connected with none. Call torch.distributed.destroy_process_group() first, or restart the kernel."
        )


def prepare_fork() -> None:
    """Stop what would not survive the fork and can be started again on both sides."""
    if process_group_exists():  # of one rank: this kernel, from an earlier Trainer
        shut_down(destroy_process_group=True)
        gc.collect()
        forget_rendezvous()
    _end_openmp_threads()
    for stream in (sys.stdout, sys.stderr):  # what is buffered would be written by every rank too
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _end_openmp_threads() -> None:
    """End the threads of GNU OpenMP, which starts new ones when it needs them."""
    # After a fork its record of them is there, the threads are not, and the first operation that wants to
    # work on several cores waits for them for ever. The libraries of Intel and LLVM look after this
    # themselves.
    for path in _loaded_libraries("libgomp"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_HARD)


def _loaded_libraries(name: str) -> list[str]:
    paths = set()
    with suppress(OSError):  # another system than Linux has no such file
        for line in _MAPS.read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.rpartition("/")[2].startswith(name):
                paths.add(path)
    return sorted(paths)


# -- What a rank of a notebook notes of the error it ends with, and what the kernel raises for it --

OUT_OF_MEMORY = "out of host memory; declare the model in a cell outside and pass it in"
# Signals by which a process ends that gets no memory; which one depends on who noticed it first.
_FOR_MEMORY = tuple(getattr(signal, name) for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT"))
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


@dataclass(frozen=True)
class _Raised:
    """What one rank has raised: when [s], the record, and the error itself as bytes."""

    when: float
    record: FailureRecord
    error: Path


def note_raised(folder: Path, error: BaseException, *, rank: int, world_size: int) -> None:
    """Note the error with which this rank ends."""
    record = describe_error(error, rank, world_size, dict)
    if write_whole(folder / f"{rank}.error", error_to_bytes(error)) is None:
        write_whole(folder / f"{rank}.raised", json.dumps([time.time(), record.to_json()]))


def error_of_ranks(
    folder: Path,
    ended: Sequence[BadEnd],  # those that failed together with the first one
    *,
    world_size: int,
    memory: MemoryWatch,  # since before the launch
) -> BaseException:
    """Return what the kernel raises for ranks that failed."""
    # An error that every rank has raised alike is that error. For any other the first rank that failed is
    # named, with its own traceback.
    raised = _raised(folder)
    killed = [end for end in ended if end.returncode < 0]
    if not killed and len(raised) == world_size and len({note.record.summary for note in raised}) == 1:
        return _alike(min(raised, key=lambda note: note.record.rank), world_size)
    if killed:  # what the others raise is a consequence of that
        record = record_of_end(killed[0], world_size, memory)
    else:
        agreed = first_failure(folder)  # by ranks that had met
        own = [note for note in raised if not _is_consequence(note.record)] or raised
        known = [agreed] if agreed else [note.record for note in own]
        record = known[0] if known else record_of_end(ended[0], world_size, memory)
    if record.kind == "interrupt":
        return KeyboardInterrupt()
    failed = RankFailedError(record.report(), record)
    show_plainly(failed, record.exit_code)
    return show_in_cell(failed, f"RankFailedError: {failed}")


def _is_consequence(record: FailureRecord) -> bool:
    """Return whether a rank has raised this because another had ended."""
    kind, _, text = record.summary.partition(": ")
    return kind == RankFailedError.__name__ or is_broken_collective(RuntimeError(text))


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


def _alike(note: _Raised, world_size: int) -> BaseException:
    error = error_from_bytes(note.error.read_bytes())
    text = f"{note.record.traceback.rstrip()}\n\nAll {world_size} ranks raised this alike."
    return show_in_cell(error, text)


def _raised(folder: Path) -> list[_Raised]:
    """Return what the ranks noted, the first one first."""
    found = []
    for file in folder.glob("*.raised"):
        when, record = json.loads(file.read_text(encoding="utf-8"))
        found.append(_Raised(when, FailureRecord.from_json(record), file.with_suffix(".error")))
    return sorted(found, key=lambda note: note.when)


def record_of_end(end: BadEnd, world_size: int, memory: MemoryWatch) -> FailureRecord:
    """Return the record of a rank that ended without reporting an error, out of memory or not."""
    kind, summary, code = describe_exit(end.returncode)
    if memory.explains(end.returncode):
        summary = OUT_OF_MEMORY
    return FailureRecord(end.rank, world_size, socket.gethostname(), end.pid, kind, summary, exit_code=code)


# -- Runs a function in several ranks that are forked from this process: the kernel of a notebook --

_RESULT = "result"
_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """All that a rank needs to begin; a fork needs no pickle of it."""

    function: Callable[..., Any]
    args: Sequence[Any]
    world_size: int
    folder: Path
    environment: dict[str, str]
    before: Sequence[Callable[[int, int], None]]


def run_in_ranks(
    function: Callable[..., Any],
    args: Sequence[Any],  # not copied: shared with this process until a rank writes into them
    *,
    world_size: int,
    grace_period: float,  # how long the others may take to end when one has failed [s]
    before: Sequence[Callable[[int, int], None]] = (),  # called in every rank first: with rank, world_size
) -> Any:
    """Run ``function(*args)`` in every rank, show in the cell what they print, and return what rank 0 returned."""
    check_kernel()
    stay()  # an earlier launch may have failed, and the program continued
    prepare_fork()
    memory = MemoryWatch()
    with tempfile.TemporaryDirectory(prefix="lockstep-") as name:
        folder = Path(name)
        launch = _Launch(
            function=function,
            args=args,
            world_size=world_size,
            folder=folder,
            environment=_environment(world_size),
            before=before,
        )
        ranks: RankProcesses

        def between() -> None:
            memory.look()
            output.show()

        ranks = RankProcesses(
            lambda rank: _run_rank(rank, launch),
            number=world_size,
            grace_period=grace_period,
            between=between,
        )
        output = RankOutput(folder, world_size, has_ended=ranks.has_ended)
        ended = _wait_for(ranks, output)
        if ended:
            raise error_of_ranks(folder, ended, world_size=world_size, memory=memory)
        preempted = agreed_exit(folder)
        if preempted is not None:
            raise preempted
        return _result(folder)


def _wait_for(ranks: RankProcesses, output: RankOutput) -> Any:
    try:
        ranks.start()
        return ranks.wait()
    except KeyboardInterrupt:
        ranks.interrupt()
        raise
    finally:
        ranks.kill()
        output.close()


def _environment(world_size: int) -> dict[str, str]:
    return {
        **token_for_children(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def _result(folder: Path) -> Any:
    file = folder / _RESULT
    return pickle.loads(file.read_bytes()) if file.exists() else None


# ------------------------------------------------------------------ in a rank


def _run_rank(rank: int, launch: _Launch) -> None:
    """Be one rank: run the function and note how it ended."""
    _begin(rank, launch)
    try:
        for function in launch.before:
            function(rank, launch.world_size)
        value = launch.function(*launch.args)
        if rank == 0:
            _keep_result(launch.folder, value)
    except KeyboardInterrupt:
        end_now(_INTERRUPTED)
    except Preempted as preempted:
        note_agreed_exit(preempted)
    except SystemExit as error:
        if error.code not in (None, 0):
            _end_with(error, rank, launch)
    except BaseException as error:
        _end_with(error, rank, launch)


def _begin(rank: int, launch: _Launch) -> None:
    begin_rank(rank, launch.folder)
    end_with_parent()
    os.environ.update({**launch.environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    keep_notes_in(launch.folder)
    apply_threads("auto", bind_cores=False, local_rank=rank, local_world_size=launch.world_size)


def _end_with(error: BaseException, rank: int, launch: _Launch) -> None:
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without the frame of this file
    if not isinstance(error, RankFailedError):  # that one was noted when it arrived
        note_raised(launch.folder, error, rank=rank, world_size=launch.world_size)
    end_now(1)


def _keep_result(folder: Path, value: Any) -> None:
    """Keep what the function returned for the kernel, tensors on the CPU."""
    try:
        content = pickle.dumps(move_data_to_device(value, "cpu"))
    except Exception as error:  # whatever a user's class makes of its pickle
        say(
            f"lightning-lockstep: rank 0 returned a {type(value).__name__}, which cannot be sent to the kernel"
            f" ({type(error).__name__}: {error}), so None is returned there. Return what can be pickled, such as a"
            " dict of metrics or a state_dict()."
        )
        return
    why = write_whole(folder / _RESULT, content)
    if why is not None:
        say(
            f"lightning-lockstep: what rank 0 returned could not be kept for the kernel in {folder}: {why}; so None is"
            " returned there."
        )
