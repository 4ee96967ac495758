"""The record of a failure: what is known of it, printed and sent; tracebacks without the frames of libraries."""

from __future__ import annotations

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
from typing import Any, get_args

from torch.distributed import DistError

from lightning_lockstep._lightning import SIGTERMException
from lightning_lockstep._settings import full_traceback
from lightning_lockstep._text import SAVED, exit_in_words, ranks_in_words
from lightning_lockstep.errors import FailedRank, FailureKind, LockstepError, RankFailedError

# Codes of ECMA-48 that colour, move or link: ``ESC [ ... letter``, ``ESC ] ... BEL``, ``ESC letter``.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")

# -- Tracebacks that show the user's own frames, and of torch, Lightning, Hydra and this package how many
# there were

# What a package is called for readers, by the folder it is installed in.
_FOLDED = {
    "torch": "torch",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "lightning_fabric": "lightning",
    "lightning_utilities": "lightning",
    "hydra": "hydra",
    "omegaconf": "hydra",
    "deepspeed": "deepspeed",
    "lightning_lockstep": "lightning_lockstep",
}
_OWN = Path(__file__).parents[2]
_STANDARD = os.__file__.rpartition(os.sep)[0] + os.sep
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


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
    return "".join(_lines(traceback.TracebackException.from_exception(error)))


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
        package = _package_of(frame.filename)
        is_standard = frame.filename.startswith(_STANDARD) and "-packages" not in frame.filename
        if inside and package is None and not is_standard:
            return frame.name
        inside = inside or package == "lightning"
    return None


def _lines(error: traceback.TracebackException) -> Iterator[str]:
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _lines(before)
        yield _CAUSE if error.__cause__ is not None else _CONTEXT
    if getattr(error, "exceptions", None):  # a group: Python draws its tree
        yield from error.format(chain=False)
        return
    if error.stack:
        yield "Traceback (most recent call last):\n"
        yield from _frames(error.stack)
    yield from error.format_exception_only()


def _frames(stack: Iterable[traceback.FrameSummary]) -> Iterator[str]:
    *frames, last = stack
    hint = "; LOCKSTEP_FULL_TRACEBACK=1 shows them"
    for folded, group in itertools.groupby(frames, key=lambda frame: _package_of(frame.filename) is not None):
        found = list(group)
        if not folded or len(found) == 1:
            yield from traceback.StackSummary.from_list(found).format()
            continue
        names = {_package_of(frame.filename) or "" for frame in found}
        yield f"  ... {len(found)} frames of {', '.join(sorted(names))}{hint}\n"
        hint = ""
    yield from traceback.StackSummary.from_list([last]).format()


def _package_of(filename: str) -> str | None:
    """Return the name of the package that a file belongs to, if frames of it are folded."""
    path = Path(filename)
    if path.is_relative_to(_OWN):
        return "lightning_lockstep"
    parts = path.parts
    for place in ("site-packages", "dist-packages"):
        if place in parts[:-1]:
            return _FOLDED.get(parts[len(parts) - 1 - parts[::-1].index(place) + 1].removesuffix(".py"))
    return None


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
# The errors that say so.
_BREAKS = ("RuntimeError", "Dist", "Connection", "BrokenPipeError")


@dataclass(frozen=True)
class FailureRecord(FailedRank):
    """All that is known of the rank that failed first, with the text that reports it."""

    @property
    def ended(self) -> bool:
        """Whether the rank's process has ended, so that no program can have caught what happened."""
        return self.kind in ("exit", "signal", "vanished")

    def headline(self) -> str:
        """Return one line: which rank failed, where and with what."""
        # A process that has ended cannot say where it was.
        place = (
            f" {'while the others were ' if self.ended else ''}at {place_in_words(self.where)}"
            if self.where
            else ""
        )
        process = f" (host {self.host}, process {self.pid})" if self.host else ""
        what = self.summary
        if self.traceback and len(what) > _HEADLINE:
            what = f"{what[:_HEADLINE]}... ({len(what):,} characters; all of them are in the traceback)"
        who = f"rank {self.rank} of {self.world_size}{process}"
        if self.kind == "signal" and what.startswith("killed by "):
            return f"{who} was {what}{place}"
        return f"{who} {_VERBS[self.kind]}{place}: {what}"

    def report(self) -> str:
        """Return headline and traceback of the failed rank, the headline once more, and the file that has all of it."""
        hint = _hint(self)
        lines = [self.headline(), "The other ranks were stopped."]
        if hint:
            lines.append(hint)
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
        return f"{SAVED}{shown}/{FAILURE_FILE}; for what it says and what to do next: lockstep-doctor run {shown}"

    def printed(self) -> str:
        """Return the report as it is printed; without the traceback where torchrun shows that last."""
        text = self.report()
        if self.shown_by_torchrun:
            last = "The traceback is at the end of what torchrun prints."
            text = "\n".join(
                filter(None, [self.headline(), "The other ranks were stopped.", self.saved_to(), last])
            )
        return f"\nlightning-lockstep: {text}\n"

    @property
    def shown_by_torchrun(self) -> bool:
        """Whether the closing summary of torchrun, of this host alone and of the last attempt, has the traceback."""
        given = os.environ
        is_last = given.get("TORCHELASTIC_RESTART_COUNT") == given.get("TORCHELASTIC_MAX_RESTARTS")
        has_summary = "TORCHELASTIC_ERROR_FILE" in given and given.get("GROUP_WORLD_SIZE") == "1"
        return has_summary and is_last and self.traceback.startswith("Traceback")

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> FailureRecord:
        """Return what :meth:`to_json` wrote, without characters that steer a terminal; ValueError where it is none."""
        given = json.loads(text)
        if not (isinstance(given, dict) and _FIELDS.keys() == given.keys()):
            raise ValueError("it does not have the fields of a failure record")
        for name, kind in _FIELDS.items():
            if not isinstance(given[name], kind) or isinstance(given[name], bool):
                raise ValueError(f"{name} of a failure record is {given[name]!r}")
        if given["kind"] not in get_args(FailureKind):
            raise ValueError(f"kind of a failure record is {given['kind']!r}")
        texts = {name: _without_escapes(given[name]) for name, kind in _FIELDS.items() if kind is str}
        where = {
            _without_escapes(key): value if isinstance(value, int) else _without_escapes(str(value))
            for key, value in given["where"].items()
        }
        return cls(**{**given, **texts, "where": where})


_FIELDS = {name: type(value) for name, value in asdict(FailureRecord(0, 1, "", 0, "exit", "")).items()}


# How much of a text stands in a headline [characters]: above it or below it is all of it, in the traceback.
_HEADLINE = 240
_VERBS: dict[str, str] = {
    "exception": "failed",
    "exit": "ended",
    "signal": "was killed",
    "vanished": "was lost",
    "interrupt": "was interrupted",
}


def _hint(record: FailureRecord) -> str:
    if record.kind == "signal" and "SIGKILL" in record.summary:
        return (
            "SIGKILL is sent by the operating system or by another program: most often the kernel ran out of"
            " memory (see `dmesg`) or the job scheduler enforced a limit."
        )
    if record.kind == "exit":
        return "It ended without a report; what it printed itself is above."
    if record.kind == "exception" and _says_broken(record.summary) and record.summary.startswith(_BREAKS):
        return (
            "A collective operation broke, most often because another rank ended; none has reported a failure, so"
            " look at what the program that started the ranks says of them."
        )
    if record.kind == "vanished":
        return "Its process or host ended without reporting an error: look at that host's own logs."
    return ""


#: Of a place: how many batches this rank's loaders have for validation, test or prediction; not shown with the place.
BATCHES = "batches"
_where: Callable[[], Mapping[str, Any]] = dict


def tell_place_by(where: Callable[[], Mapping[str, Any]]) -> None:
    """Have reports say what this rank is doing by what ``where`` returns, such as ``{"epoch": 0, "step": 7}``."""
    global _where
    _where = where


def own_place(*, batches: bool = False) -> dict[str, Any]:
    """Return what this rank is doing, as far as known, perhaps with ``BATCHES``; any thread may ask."""
    with suppress(Exception):
        return {key: value for key, value in _where().items() if batches or key != BATCHES}
    return {}


def place_in_words(where: Mapping[str, Any]) -> str:
    """Return a place as reports name it: ``epoch 0, step 7, batch 7, stage train``."""
    return ", ".join(f"{key} {value}" for key, value in where.items() if key != BATCHES)


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
    """Return the record of an exception that was raised in this process."""
    kind: FailureKind = "interrupt" if isinstance(error, KeyboardInterrupt) else "exception"
    code = 130 if kind == "interrupt" else 1
    if isinstance(error, SystemExit):
        # Lightning's SIGTERMException carries no code; alone among the ranks, even code 0 is a failure.
        code = error.code if isinstance(error.code, int) and error.code else 1
        code = 128 + signal.SIGTERM if isinstance(error, SIGTERMException) else code
    place: Mapping[str, Any] = {}
    with suppress(Exception):
        place = dict(where())
        function = user_function(error)
        if function is not None:
            place = {**place, "in": function}
    return FailureRecord(
        rank,
        world_size,
        socket.gethostname(),
        os.getpid(),
        kind,
        _summary(error),
        _without_escapes(format_error(error)),
        place,
        code,
    )


def _summary(error: BaseException) -> str:
    if isinstance(error, SIGTERMException):
        return "SIGTERMException: it received SIGTERM"
    name, text = type(error).__name__, _first_lines(_without_escapes(str(error)))
    return f"{name}: {text}" if text else name


def _without_escapes(text: str) -> str:
    """Return a text without the codes that colour it or steer a terminal, and without other invisible characters."""
    return "".join(one for one in _ESCAPES.sub("", text) if one.isprintable() or one in "\n\t")


def _first_lines(text: str) -> str:
    """Return the first line of a text that is not blank, and the next one too if the first ends with a colon."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


def is_alike(error: BaseException, record: FailureRecord) -> bool:
    """Return whether ``error`` is of the type that another rank has failed with, and no consequence of that."""
    same_type = record.summary.partition(":")[0] == type(error).__name__
    return same_type and not isinstance(error, SystemExit) and not is_broken_collective(error)


def describe_exit(returncode: int) -> tuple[FailureKind, str, int]:
    """Return (kind, summary, exit code for the job) for a process's return code, negative for a signal."""
    if returncode < 0:
        return "signal", exit_in_words(returncode), 128 - returncode
    return "exit", exit_in_words(returncode), returncode


def is_broken_collective(error: BaseException) -> bool:
    """Return whether ``error`` is how a backend reports that a peer has exited or did not arrive."""
    if isinstance(error, (DistError, ConnectionError)):
        return True
    return isinstance(error, RuntimeError) and _says_broken(str(error))


def _says_broken(text: str) -> bool:
    text = text.lower()
    return any(word in text for word in _BROKEN) or bool(re.search(_STORE, text))
