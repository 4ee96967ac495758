"""Notes in which a rank says how it ended: for the process that started it, and for who looks at the run later.

A launcher of ours that is no rank itself gives its ranks a folder, and each rank leaves a note there:

================= =================== =============================================================================
``<rank>.failed`` by multiprocessing  a rank failed; the record of the first one, the same from every rank
``<pid>.ended``   by mpirun           this rank ended in good order; mpirun may call the loss of a host a success too
================= =================== =============================================================================

``torchrun`` has its own file for a failure, which is written too. Rank 0 leaves ``failure.json`` in the folder of the
run: the record of the first failure.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lightning_lockstep._settings import NOTES_FOLDER
from lightning_lockstep._system import write_report, write_whole
from lightning_lockstep.distributed.failure.process_exit import outcome
from lightning_lockstep.distributed.failure.record import FAILURE_FILE, FailureRecord


def failure_note(folder: Path, local_rank: int) -> Path:
    """Return the file in which a rank of this host notes which rank failed first."""
    # Not named by the process id: if the interpreter is a script, the started process has another id than the rank.
    return folder / f"{local_rank}.failed"


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


def note_failure(record: FailureRecord) -> None:
    """Note which rank failed first, for the process that has started this one: one of ours, or ``torchrun``."""
    if outcome.note is not None:
        write_whole(outcome.note, record.to_json())
    given = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if given:
        # torchrun takes the earliest error for the root cause, which it shows last.
        is_cause = (record.host, record.pid) == (socket.gethostname(), os.getpid())
        text = f"{record.headline()}\n{record.saved_to()}".rstrip()
        text = text if is_cause else f"another rank failed first: {text}"
        extra = {"py_callstack": text, "timestamp": str(int(time.time()) + (not is_cause))}
        write_whole(Path(given), json.dumps({"message": {"message": text, "extraInfo": extra}}))


def forget_failure() -> None:
    """Take the note of a failure back: the program has caught it."""
    of_torchrun = os.environ.get("TORCHELASTIC_ERROR_FILE")
    for path in (of_torchrun, outcome.note):
        if path:
            with suppress(OSError):
                Path(path).unlink()


def note_orderly_end() -> None:
    """Leave a note if this process ends in good order, for a launcher of ours that runs mpirun on this host."""

    def note() -> None:
        in_order = not (outcome.forced_exit or outcome.ends_with_error)
        if in_order and Path(given).is_dir():  # on the host of the launcher alone
            Path(given, f"{os.getpid()}.ended").touch()

    if given := os.environ.get(NOTES_FOLDER, ""):
        atexit.register(note)


# -- for the process that has started the ranks


def first_failure(folder: Path) -> FailureRecord | None:
    """Return what the ranks noted of the one that failed first, or ``None``."""
    notes = sorted(folder.glob("*.failed"), key=lambda note: note.stat().st_mtime_ns)
    records = [FailureRecord.from_json(note.read_text(encoding="utf-8")) for note in notes]
    # Ranks that have met all note the same record: take the copy that names its file. Else take the earliest.
    return max(records, key=lambda record: bool(record.file), default=None)


def has_orderly_end(folder: Path) -> bool:
    return any(folder.glob("*.ended"))
