"""Runs a function in several ranks that are forked from this process: the kernel of a notebook."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_lockstep._console import say
from lightning_lockstep._files import write_whole
from lightning_lockstep._lightning import move_data_to_device, rank_zero_only
from lightning_lockstep.distributed.failure.exit_note import agreed_exit, keep_notes_in, note_agreed_exit
from lightning_lockstep.distributed.failure.process_exit import end_now, stay
from lightning_lockstep.distributed.process_group import free_port
from lightning_lockstep.distributed.side_channel.job_token import token_for_children
from lightning_lockstep.errors import Preempted, RankFailedError
from lightning_lockstep.launchers.cpu_threads import apply_threads
from lightning_lockstep.launchers.notebook.before_fork import check_kernel, prepare_fork
from lightning_lockstep.launchers.notebook.begin import begin_rank
from lightning_lockstep.launchers.notebook.failures import MemoryWatch, error_of_ranks, note_raised
from lightning_lockstep.launchers.notebook.output import RankOutput
from lightning_lockstep.launchers.rank_processes import RankProcesses, end_with_parent

__all__ = ["run_in_ranks"]

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
