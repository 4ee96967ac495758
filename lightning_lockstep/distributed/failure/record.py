"""The record of a failure: what is known of it, printed, sent and noted.

A launcher of ours that is no rank itself gives its ranks a folder, and each rank leaves a note there:

================= =================== =============================================================================
``<rank>.failed`` by multiprocessing  a rank failed; the record of the first one, the same from every rank
``<pid>.ended``   by mpirun           this rank ended in good order; mpirun alone may also call the loss of a host that
================= =================== =============================================================================

``torchrun`` has its own file for a failure, which is written too. Rank 0 leaves ``failure.json`` in the folder of the
run: the record of the first failure.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from lightning_lockstep._lightning import SIGTERMException
from lightning_lockstep._settings import NOTES_FOLDER
from lightning_lockstep._system import shell_exit_code, write_report, write_whole
from lightning_lockstep._text import SAVED, exit_in_words, ranks_in_words
from lightning_lockstep.distributed.failure.process_exit import exit_plan
from lightning_lockstep.distributed.failure.tracebacks import format_error, user_function
from lightning_lockstep.errors import (
    CollectiveMismatchError,
    CollectiveStallError,
    FailedRank,
    FailureKind,
    LockstepError,
    RankFailedError,
)

# -- What is known of the rank that failed first, and the text that reports it --

#: The file in which rank 0 keeps the record of a failure.
FAILURE_FILE = "failure.json"

# How the backends report that a peer has exited. Such an error is a consequence, seldom the cause.
_BROKEN = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "gloo",
    "nccl",
    "remote process exited",
    "socket",
    "rankfailederror",  # torch wraps what a callback in C++ has raised
)
# A store, but no word such as "restore".
_STORE = r"\b(tcp|file|hash|prefix)?store\b"


@dataclass(frozen=True)
class FailureRecord(FailedRank):
    """All that is known of the rank that failed first, with the text that reports it."""

    @property
    def ended(self) -> bool:
        """Whether the rank's process has ended, so that no program can have caught what happened."""
        return self.kind in ("exit", "signal", "vanished")

    def error(self) -> BaseException:
        """Return what the other ranks raise because of this failure."""
        if self.kind == "interrupt":
            return KeyboardInterrupt()
        if self.kind != "collective":
            return RankFailedError(self.report(), self)
        mismatch, text = CollectiveMismatchError, self.traceback.partition(": ")[2].rstrip("\n")
        return mismatch(text) if self.summary.startswith(mismatch.__name__) else CollectiveStallError(text)

    @property
    def is_of_all(self) -> bool:
        """Whether all ranks have raised this together, so that one of them reports it for all."""
        return self.world_size > 1 and self.summary.startswith(_RAISED_BY_ALL)

    def headline(self) -> str:
        """Return one line: which rank failed, where and with what."""
        # A process that has ended cannot say where it was.
        others = "while the others were " if self.ended else ""
        place = f" {others}at {place_in_words(self.where)}" if self.where else ""
        process = f" (host {self.host}, process {self.pid})" if self.host else ""
        who = f"rank {self.rank} of {self.world_size}{process}"
        if self.kind == "signal":
            return f"{who} was {self.summary}{place}"
        if self.is_of_all:
            return f"all {self.world_size} ranks stopped{place}: {self.summary}"
        return f"{who} {_VERBS[self.kind]}{place}: {self.summary}"

    def report(self) -> str:
        """Return headline and traceback of the failed rank, the headline once more, and the file that has all of it."""
        hint = _SIGKILL if self.kind == "signal" and "SIGKILL" in self.summary else _HINTS.get(self.kind, "")
        stopped = "" if self.is_of_all else "The other ranks were stopped."
        lines = list(filter(None, (self.headline(), stopped, hint)))
        if self.traceback:
            # An error of this package is its message alone.
            lines += [f"Traceback of rank {self.rank}:"] if self.traceback.startswith("Traceback") else []
            lines += ["", self.traceback.rstrip(), "", self.headline()]
        return "\n".join([*lines, self.saved_to()] if self.file else lines)

    def in_folder(self, folder: Path | None) -> FailureRecord:
        """Return the record with the file in a folder in which it is to be kept; None: in none."""
        return replace(self, file="" if folder is None else str(folder.absolute() / FAILURE_FILE))

    def saved_to(self) -> str:
        """Return the line that names the file with all this and the command that reads it; empty if there is none."""
        if not self.file:
            return ""
        folder, here = Path(self.file).parent, Path.cwd()
        shown = shlex.quote(str(folder.relative_to(here) if folder.is_relative_to(here) else folder))
        return f"{SAVED}{shown}/{FAILURE_FILE}; to read it: lockstep-doctor run {shown}"

    def printed(self) -> str:
        return f"\nlightning-lockstep: {self.report()}\n"

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> FailureRecord:
        """Return what :meth:`to_json` wrote; raises ValueError or TypeError if it is something else."""
        return cls(**json.loads(text))


# How much of an error's text stands in a headline [characters]: all of it is in the traceback.
_HEADLINE = 240
# Errors of callbacks, whose message tells which rank is to blame.
_RAISED_BY_ALL = ("OverflowDetectedError", "ReplicaMismatchError")
_VERBS: dict[str, str] = {
    "exception": "failed",
    "exit": "ended",
    "vanished": "was lost",
    "interrupt": "was interrupted",
    "collective": "failed",
}


_SIGKILL = (
    "SIGKILL is sent by the operating system or by another program: most often the kernel ran out of memory (see"
    " `dmesg`) or the job scheduler enforced a limit."
)
_HINTS: dict[str, str] = {
    "exit": "It ended without a report; what it printed itself is above.",
    "vanished": "Its process or host ended without reporting an error: look at that host's own logs.",
}

_where: Callable[[], Mapping[str, Any]] = dict


def tell_place_by(where: Callable[[], Mapping[str, Any]]) -> None:
    """Let ``where`` tell reports what this rank is doing, such as ``{"epoch": 0, "step": 7}``."""
    global _where
    _where = where


def own_place() -> dict[str, Any]:
    """Return what this rank is doing, as far as known; any thread may ask."""
    with suppress(Exception):
        return dict(_where())
    return {}


def place_in_words(where: Mapping[str, Any]) -> str:
    """Return a place as reports name it: ``epoch 0, step 7, batch 7, stage train``."""
    return ", ".join(f"{key} {value}" for key, value in where.items())


def places_in_words(places: Mapping[int, Mapping[str, Any]]) -> str:
    """Return where ranks are as a sentence, those at the same place together; empty if none is known."""
    ranks_at: dict[str, list[int]] = {}
    for rank, where in sorted(places.items()):
        if where:
            ranks_at.setdefault(place_in_words(where), []).append(rank)
    text = "; ".join(
        f"{ranks_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'} at {place}" for place, ranks in ranks_at.items()
    )
    return f"{text[0].upper()}{text[1:]}." if text else ""


def describe_error(
    error: BaseException,
    rank: int,
    world_size: int,
    where: Callable[[], Mapping[str, Any]] = own_place,
) -> FailureRecord:
    kind: FailureKind = "interrupt" if isinstance(error, KeyboardInterrupt) else "exception"
    code = shell_exit_code(-signal.SIGINT) if kind == "interrupt" else 1
    if isinstance(error, SIGTERMException):  # Lightning's carries no code
        code = shell_exit_code(-signal.SIGTERM)
    elif isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code or 1  # if one rank alone exits, even code 0 is a failure
    place, function = dict(where()), user_function(error)
    if function is not None:
        place["in"] = function
    host, text = socket.gethostname(), format_error(error)
    return FailureRecord(rank, world_size, host, os.getpid(), kind, _summary(error), text, place, code)


def _summary(error: BaseException) -> str:
    if isinstance(error, SIGTERMException):
        return "SIGTERMException: it received SIGTERM"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # "Error(s) in loading state_dict for Net:" says less than the line below it.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    if len(text) > _HEADLINE:
        text = f"{text[:_HEADLINE]}... ({len(text):,} characters; all of them are in the traceback)"
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def is_orderly_exit(error: BaseException) -> bool:
    """Return whether a program exits with code 0 on purpose, which is a failure if other ranks go on."""
    return isinstance(error, SystemExit) and not isinstance(error, SIGTERMException) and error.code in (None, 0)


def is_same_error(error: BaseException, record: FailureRecord) -> bool:
    """Return whether ``error`` is of the type with which another rank has failed, and no consequence of that."""
    if isinstance(error, LockstepError):  # of all ranks
        return True
    same_type = record.summary.partition(":")[0] == type(error).__name__
    return same_type and not isinstance(error, SystemExit) and not is_broken_collective(error)


def describe_exit(rank: int, world_size: int, pid: int, returncode: int) -> FailureRecord:
    """Return the record of a process of this host that has ended with a return code, negative for a signal."""
    kind: FailureKind = "signal" if returncode < 0 else "exit"
    summary, exit_code = exit_in_words(returncode), shell_exit_code(returncode) or 1
    return FailureRecord(rank, world_size, socket.gethostname(), pid, kind, summary, exit_code=exit_code)


def is_broken_collective(error: BaseException) -> bool:
    """Return whether ``error`` is how a backend reports that a peer has exited or did not arrive."""
    if isinstance(error, (DistError, ConnectionError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(word in text for word in _BROKEN) or re.search(_STORE, text) is not None


# -- Notes of how a rank has ended: for the process that started it, and for who looks at the run later --


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
    with suppress(OSError, ValueError, TypeError):
        FailureRecord.from_json((folder / FAILURE_FILE).read_text(encoding="utf-8"))
        (folder / FAILURE_FILE).unlink(missing_ok=True)


def note_failure(record: FailureRecord) -> None:
    """Note which rank failed first, for the process that has started this one: one of ours, or ``torchrun``."""
    if exit_plan.note is not None:
        write_whole(exit_plan.note, record.to_json())
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
    for path in (os.environ.get("TORCHELASTIC_ERROR_FILE"), exit_plan.note):
        if path:
            with suppress(OSError):
                Path(path).unlink()


def note_orderly_end() -> None:
    """Leave a note if this process ends in good order, for a launcher of ours that runs mpirun on this host."""

    def note() -> None:
        in_order = not (exit_plan.forced_exit or exit_plan.ends_with_error)
        if in_order and Path(given).is_dir():  # on the host of the launcher alone
            Path(given, f"{os.getpid()}.ended").touch()

    if given := os.environ.get(NOTES_FOLDER, ""):
        atexit.register(note)


# -- For the process that has started the ranks --


def first_failure(folder: Path) -> FailureRecord | None:
    """Return what the ranks noted of the one that failed first, or ``None``."""
    notes = sorted(folder.glob("*.failed"), key=lambda note: note.stat().st_mtime_ns)
    records = [FailureRecord.from_json(note.read_text(encoding="utf-8")) for note in notes]
    # Ranks that have met all note the same record: take the copy that names its file. Else take the earliest.
    return max(records, key=lambda record: bool(record.file), default=None)


def has_orderly_end(folder: Path) -> bool:
    return any(folder.glob("*.ended"))
