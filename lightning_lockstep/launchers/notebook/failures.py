"""What a rank of a notebook notes of the error it ends with, and what the kernel raises for it."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_lockstep import _system
from lightning_lockstep._files import write_whole
from lightning_lockstep.distributed.failure.exit_note import first_failure
from lightning_lockstep.distributed.failure.folded import format_error
from lightning_lockstep.distributed.failure.record import (
    FailureRecord,
    describe_error,
    describe_exit,
    is_broken_collective,
)
from lightning_lockstep.distributed.failure.uncaught import error_from_bytes, error_to_bytes, show_plainly
from lightning_lockstep.errors import LockstepError, RankFailedError
from lightning_lockstep.launchers.rank_processes import BadEnd

__all__ = ["MemoryWatch", "error_of_ranks", "record_of_end", "note_raised", "plainly_in_cell", "show_in_cell"]

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
    """Return what the kernel raises for ranks that failed.

    An error that every rank has raised alike is that error. For any other the first rank that failed is named, with
    its own traceback.
    """
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
