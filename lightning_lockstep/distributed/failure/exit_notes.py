"""How a rank tells how it ended, beyond its exit code: the process that started it, and who looks at the run later.

A launcher of ours that is no rank itself gives its ranks a folder, and each rank leaves a note there:

=================== ============================================================================================
``<pid>.failed``    a rank failed; the record of the first one, the same from every rank
``<pid>.preempted`` all ranks left together on purpose, with their exit code
``<pid>.ended``     this rank came to its end in good order
``<pid>.error``     this rank ends with an error that was no failure of one rank, such as one that all raise
=================== ============================================================================================

``torchrun`` has its own file for a failure, which is written too. For who looks at the folder of the run later, rank 0
leaves ``failure.json`` there: the record of the first failure.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lightning_lockstep._settings import ended_folder
from lightning_lockstep._system import write_report, write_whole
from lightning_lockstep.distributed.failure.process_exit import at_exit, outcome, outcome_of
from lightning_lockstep.distributed.failure.record import FAILURE_FILE, FailureRecord
from lightning_lockstep.errors import Preempted

_folder: Path | None = None


def keep_notes_in(folder: Path) -> None:
    """Leave the notes of this process in ``folder``; by default that of the environment variable, if any."""
    global _folder
    _folder = folder


def parent_reads_notes() -> bool:
    """Return whether the process that started this rank reads its notes, and prints the report of a failure."""
    return _folder is not None


def keep_failure(record: FailureRecord) -> FailureRecord:
    """Write a record to the file that it names, if any; return it, without the file if that cannot be written."""
    if not record.file or write_report(Path(record.file), record.to_json() + "\n"):
        return record
    return replace(record, file="")


def remove_earlier_report(folder: Path) -> None:
    """Remove the report of an earlier run from a folder in which a run begins; ``failure.json`` of others stays."""
    with suppress(OSError, ValueError):
        FailureRecord.from_json((folder / FAILURE_FILE).read_text(encoding="utf-8"))
        (folder / FAILURE_FILE).unlink(missing_ok=True)


def note_for_parent(record: FailureRecord) -> None:
    """Note for the process that has started this one which rank failed first, or an error that all ranks raise."""
    _write("failed", record.to_json())


def note_failure(record: FailureRecord) -> None:
    """Note which rank failed first; also for ``torchrun``, so that its closing summary has the traceback."""
    note_for_parent(record)
    if (record.host, record.pid) == (socket.gethostname(), os.getpid()):
        note_for_torchrun("\n".join(filter(None, [record.traceback.rstrip(), record.saved_to()])))
    else:
        note_for_torchrun(f"another rank failed first: {record.headline()}", is_cause=False)


def note_for_torchrun(text: str, *, is_cause: bool = True, of: BaseException | None = None) -> None:
    """Leave what the closing summary of ``torchrun`` says of this rank, as long as ``of`` is what ends it."""
    given = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if given:
        # It takes the earliest for the root cause, which it shows last.
        seconds = time.time() + (0 if is_cause else 1)
        extra = {"py_callstack": text, "timestamp": str(int(seconds))}
        write_whole(Path(given), json.dumps({"message": {"message": text, "extraInfo": extra}}))
        outcome.note_of_error = None if of is None else (outcome_of(of), Path(given))


def forget_failure() -> None:
    """Take the note of a failure back: the program has caught it."""
    folder, of_torchrun = _notes_folder(), os.environ.get("TORCHELASTIC_ERROR_FILE")
    for path in (of_torchrun, folder and folder / f"{os.getpid()}.failed"):
        if path:
            with suppress(OSError):
                Path(path).unlink()


def note_preempted_exit(preempted: Preempted) -> None:
    """Note that all ranks have left together on purpose."""
    _write("preempted", json.dumps([preempted.reason, preempted.code, preempted.checkpoint]))


def note_orderly_end() -> None:
    """Leave a note at this process's exit if that is in good order, or with an error that was printed."""

    def note() -> None:
        if not outcome.forced_exit_pending:
            _write("error" if outcome.ends_with_error else "ended")

    at_exit(note)


def _write(kind: str, content: str = "") -> None:
    folder = _notes_folder()
    if folder is not None and folder.is_dir():  # a rank on another host has no such folder
        write_whole(folder / f"{os.getpid()}.{kind}", content)


def _notes_folder() -> Path | None:
    given = ended_folder()
    return _folder or (Path(given) if given else None)


# -- for the process that has started the ranks


def first_failure(folder: Path) -> FailureRecord | None:
    """Return what the ranks noted of the one that failed first, or ``None``."""
    notes = [FailureRecord.from_json(note) for note in _notes(folder, "failed")]
    return max(notes, key=lambda record: bool(record.file), default=None)


def preempted_exit(folder: Path) -> Preempted | None:
    """Return the exit on which all ranks agreed, or ``None``."""
    notes = _notes(folder, "preempted")
    return Preempted(*json.loads(notes[0])) if notes else None


def ended_with_error(folder: Path) -> bool:
    """Return whether a rank of this host has printed the error that it ended with."""
    return bool(_notes(folder, "error"))


def orderly_ends(folder: Path) -> int:
    """Return how many ranks of this host have ended in good order."""
    return len(_notes(folder, "ended"))


def _notes(folder: Path, kind: str) -> list[str]:
    return [note.read_text(encoding="utf-8") for note in sorted(folder.glob(f"*.{kind}"))]
