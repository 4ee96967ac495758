"""The record of a failure: what is known of it, printed and sent; tracebacks without the frames of libraries."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shlex
import signal
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from lightning_lockstep._lightning import SIGTERMException
from lightning_lockstep._settings import full_traceback
from lightning_lockstep._text import SAVED, exit_in_words, ranks_in_words
from lightning_lockstep.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveStallError,
    FailedRank,
    FailureKind,
    LockstepError,
    RankFailedError,
)

# -- Tracebacks that show the user's own frames, and how many frames of libraries were left out --

LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
# Whose frames are folded, by the folder that a package is installed in.
_FOLDED = (
    *("torch", *LIGHTNING, "lightning_utilities"),
    *("hydra", "omegaconf", "deepspeed", "lightning_lockstep"),
)
# These are not the user's program either; decorators of the last add a frame between a user's call and torch.
_LIBRARIES = (*_FOLDED, "torchmetrics", "typing_extensions")
_OWN = f"{Path(__file__).parents[2]}{os.sep}"
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\](\w+)")
_STANDARD = os.__file__.rpartition(os.sep)[0] + os.sep


def format_error(error: BaseException) -> str:
    """Return the traceback of ``error`` as text that ends with a newline."""
    # Frames of torch, Lightning, Hydra and this package that follow each other are one line, but for the
    # frame that raised. An error of this package is its message alone. ``LOCKSTEP_FULL_TRACEBACK=1`` shows
    # all there is.
    if full_traceback():
        return "".join(traceback.format_exception(error))
    if isinstance(error, SIGTERMException):
        return ""  # raised at the next boundary of a batch, wherever the signal has arrived
    if isinstance(error, LockstepError) and not isinstance(error, RankFailedError):
        return "".join(traceback.format_exception_only(type(error), error))
    told = traceback.TracebackException.from_exception(error)
    _fold(told)
    return "".join(told.format())


def folded_stack(places: Iterable[tuple[str, int, str]]) -> list[str]:
    """Return the lines of a stack, given files, lines and functions, the innermost last; no file is read for it."""
    frames = [traceback.FrameSummary(*place, lookup_line=False, line="") for place in places]
    if not frames:
        return []
    text = traceback.StackSummary.from_list(frames).format() if full_traceback() else _frames(frames)
    return [line.strip() for line in text]


def user_function(error: BaseException) -> str | None:
    """Return the name of the user's function that Lightning called and that raised, such as ``training_step``."""
    inside = False
    for frame in traceback.extract_tb(error.__traceback__):
        package = package_of(frame.filename)
        if inside and package is None:
            return frame.name
        inside = inside or package in LIGHTNING
    return None


class _FoldedStack(traceback.StackSummary):
    """A stack of which Python prints frames of libraries that follow each other as one line."""

    def format(self, **_: Any) -> list[str]:
        return list(_frames(self))


def _fold(error: traceback.TracebackException) -> None:
    for before in (error.__cause__, error.__context__, *(getattr(error, "exceptions", None) or ())):
        if before is not None:
            _fold(before)
    error.stack = _FoldedStack(error.stack)


def _frames(stack: Iterable[traceback.FrameSummary]) -> Iterator[str]:
    *frames, last = stack
    hint = "; LOCKSTEP_FULL_TRACEBACK=1 shows them"
    for folded, group in itertools.groupby(frames, key=lambda frame: package_of(frame.filename) in _FOLDED):
        found = list(group)
        if not folded or len(found) == 1:
            yield from traceback.StackSummary.from_list(found).format()
            continue
        names = {package_of(frame.filename) or "" for frame in found}
        yield f"  ... {len(found)} frames of {', '.join(sorted(names))}{hint}\n"
        hint = ""
    yield from traceback.StackSummary.from_list([last]).format()


@functools.lru_cache(10_000)  # because the guard asks for each frame of a call
def package_of(filename: str) -> str | None:
    """Return the library that a file belongs to, ``python`` for Python's own; ``None``: it is of the user's program."""
    if filename.startswith(_OWN):
        return "lightning_lockstep"
    if found := _INSTALLED.match(filename):
        return found[1] if found[1] in _LIBRARIES else None
    return "python" if filename.startswith((_STANDARD, "<frozen")) else None


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

    def collective_error(self) -> CollectiveError:
        """Return the error that all ranks raise because of a diagnosis, of which this is the record."""
        kind, text = CollectiveMismatchError, self.traceback.partition(": ")[2].rstrip("\n")
        return kind(text) if self.summary.startswith(kind.__name__) else CollectiveStallError(text)

    @property
    def is_of_all(self) -> bool:
        """Whether all ranks have raised this together, of which one rank reports it."""
        return self.world_size > 1 and self.summary.startswith(_RAISED_BY_ALL)

    def headline(self) -> str:
        """Return one line: which rank failed, where and with what."""
        # A process that has ended cannot say where it was.
        others = "while the others were " if self.ended else ""
        place = f" {others}at {place_in_words(self.where)}" if self.where else ""
        process = f" (host {self.host}, process {self.pid})" if self.host else ""
        who = f"rank {self.rank} of {self.world_size}{process}"
        if self.kind == "signal" and self.summary.startswith("killed by "):
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
        """Return what :meth:`to_json` wrote; raises ValueError if it is something else."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError("it does not have the fields of a failure record") from error


# How much of an error's text stands in a headline [characters]: all of it is in the traceback.
_HEADLINE = 240
# Errors of callbacks, whose message tells which rank is to blame.
_RAISED_BY_ALL = ("OverflowDetectedError", "ReplicaMismatchError")
_VERBS: dict[str, str] = {
    "exception": "failed",
    "exit": "ended",
    "signal": "was killed",
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
        f"{ranks_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'} at {place}"
        for place, ranks in ranks_at.items()
    )
    return f"{text[0].upper()}{text[1:]}." if text else ""


def describe_error(
    error: BaseException,
    rank: int,
    world_size: int,
    where: Callable[[], Mapping[str, Any]] = own_place,
) -> FailureRecord:
    kind: FailureKind = "interrupt" if isinstance(error, KeyboardInterrupt) else "exception"
    code = 130 if kind == "interrupt" else 1
    if isinstance(error, SystemExit):
        # Lightning's SIGTERMException carries no code. If one rank alone exits, even code 0 is a failure.
        code = error.code if isinstance(error.code, int) and error.code else 1
        code = 128 + signal.SIGTERM if isinstance(error, SIGTERMException) else code
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
    more = (
        f"... ({len(text):,} characters; all of them are in the traceback)" if len(text) > _HEADLINE else ""
    )
    return f"{type(error).__name__}: {text[:_HEADLINE]}{more}".removesuffix(": ")


def leaves_in_order(error: BaseException) -> bool:
    """Return whether an error is a program's own wish to end without one, which is a failure if others go on."""
    return (
        isinstance(error, SystemExit) and not isinstance(error, SIGTERMException) and error.code in (None, 0)
    )


def is_alike(error: BaseException, record: FailureRecord) -> bool:
    """Return whether ``error`` is of the type that another rank has failed with, and no consequence of that."""
    if isinstance(error, LockstepError):  # of all ranks
        return True
    same_type = record.summary.partition(":")[0] == type(error).__name__
    return same_type and not isinstance(error, SystemExit) and not is_broken_collective(error)


def describe_exit(rank: int, world_size: int, pid: int, returncode: int) -> FailureRecord:
    """Return the record of a process of this host that has ended with a return code, negative for a signal."""
    kind: FailureKind = "signal" if returncode < 0 else "exit"
    code = 128 - returncode if returncode < 0 else returncode or 1  # of the job
    host, summary = socket.gethostname(), exit_in_words(returncode)
    return FailureRecord(rank, world_size, host, pid, kind, summary, exit_code=code)


def is_broken_collective(error: BaseException) -> bool:
    """Return whether ``error`` is how a backend reports that a peer has exited or did not arrive."""
    if isinstance(error, (DistError, ConnectionError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(word in text for word in _BROKEN) or re.search(_STORE, text) is not None
