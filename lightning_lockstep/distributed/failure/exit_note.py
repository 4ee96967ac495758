"""How a rank tells the process that started it how it ended, beyond its exit code.

A launcher of ours that is no rank itself gives its ranks a folder, and each rank leaves a note there:

================ ============================================================================================
``<pid>.failed``  a rank failed; the record of the first one, the same from every rank
``<pid>.agreed``  all ranks left together on purpose, with an exit code of their own
``<pid>.ended``   this rank came to its end in good order
================ ============================================================================================

``torchrun`` has a file of its own for a failure, which is written beside.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from lightning_lockstep._environment import ended_folder
from lightning_lockstep._files import write_whole
from lightning_lockstep.distributed.failure.process_exit import at_exit, ends_with_error, leaving
from lightning_lockstep.distributed.failure.record import FailureRecord
from lightning_lockstep.errors import Preempted

__all__ = [
    "agreed_exit",
    "first_failure",
    "forget_failure",
    "keep_notes_in",
    "note_agreed_exit",
    "note_failure",
    "note_orderly_end",
    "orderly_ends",
]

_folder: Path | None = None


def keep_notes_in(folder: Path) -> None:
    """Leave the notes of this process in ``folder``; by default that of the environment variable, if any."""
    global _folder
    _folder = folder


def note_failure(record: FailureRecord) -> None:
    """Note which rank failed first; also for ``torchrun``, so that its closing summary has the traceback."""
    _write("failed", record.to_json())
    # Every rank that ends by it does so: torchrun's agent sums up whichever it sees end first.
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        content = {
            "message": {
                "message": record.headline(),
                "extraInfo": {"py_callstack": record.traceback, "timestamp": str(int(time.time()))},
            }
        }
        write_whole(Path(path), json.dumps(content))


def forget_failure() -> None:
    """Take the note of a failure back: the program has caught it."""
    folder, of_torchrun = _notes_folder(), os.environ.get("TORCHELASTIC_ERROR_FILE")
    paths = [Path(of_torchrun)] if of_torchrun else []
    paths += [folder / f"{os.getpid()}.failed"] if folder else []
    for path in paths:
        with suppress(OSError):
            path.unlink()


def note_agreed_exit(preempted: Preempted) -> None:
    """Note that all ranks have left together on purpose."""
    _write("agreed", json.dumps([preempted.reason, preempted.code, preempted.checkpoint]))


def note_orderly_end() -> None:
    """Leave a note at this process's exit if that is in good order."""

    def note() -> None:
        if not leaving() and not ends_with_error():
            _write("ended", "")

    at_exit(note)


# -- for the process that has started the ranks -----------------------------------------------------


def first_failure(folder: Path) -> FailureRecord | None:
    """Return what the ranks noted of the one that failed first, or ``None``."""
    for note in sorted(folder.glob("*.failed")):
        return FailureRecord.from_json(note.read_text(encoding="utf-8"))
    return None


def agreed_exit(folder: Path) -> Preempted | None:
    """Return the exit on which all ranks agreed, or ``None``."""
    for note in sorted(folder.glob("*.agreed")):
        return Preempted(*json.loads(note.read_text(encoding="utf-8")))
    return None


def orderly_ends(folder: Path) -> int:
    """Return how many ranks of this host have ended in good order."""
    return len(list(folder.glob("*.ended")))


def _write(kind: str, content: str) -> None:
    folder = _notes_folder()
    if folder is not None and folder.is_dir():  # a rank on another host has no such folder
        write_whole(folder / f"{os.getpid()}.{kind}", content)


def _notes_folder() -> Path | None:
    given = ended_folder()
    return _folder or (Path(given) if given else None)
