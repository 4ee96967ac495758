"""What is known of the rank that failed first, and the text that reports it."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from torch.distributed import DistError

from lightning_lockstep._lightning import SIGTERMException
from lightning_lockstep._text import exit_in_words
from lightning_lockstep.distributed.failure.folded import format_error, user_function

__all__ = ["FailureRecord", "describe_error", "describe_exit", "is_alike", "is_broken_collective"]

Kind = Literal["exception", "exit", "signal", "vanished", "interrupt"]

# How the backends report that a peer has exited. Such an error is a consequence, seldom the cause.
_BROKEN = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "gloo",
    "nccl",
    "remote process exited",
    "store",
    "socket",
    "rankfailederror",  # torch wraps what a callback in C++ has raised
)


@dataclass(frozen=True)
class FailureRecord:
    """All that is known of the rank that failed first.

    Attributes:
        rank: Its number.
        world_size: Number of ranks in the run.
        host: Host name of its node; empty where it is not known.
        pid: Its process id on that host; 0 where it is not known.
        kind: ``exception``; ``exit`` (ended with a code, nothing more is known); ``signal`` (was killed);
            ``vanished`` (its host or process ended without reporting an error); ``interrupt`` (Ctrl-C).
        summary: One line: the error's type and text, the exit code, or the signal.
        traceback: Its traceback as text; empty where there is none.
        where: ``{"epoch": 0, "step": 7, "stage": "train"}`` as far as known.
        exit_code: Exit code for the whole job.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    kind: Kind
    summary: str
    traceback: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    exit_code: int = 1

    @property
    def ended(self) -> bool:
        """Whether the rank's process has ended, so that no program can have caught what happened."""
        return self.kind in ("exit", "signal", "vanished")

    def headline(self) -> str:
        """Return one line: which rank failed, where and with what."""
        place = ", ".join(f"{key} {value}" for key, value in self.where.items())
        place = f" at {place}" if place else ""
        process = f" (host {self.host}, process {self.pid})" if self.host else ""
        what = self.summary
        if self.traceback and len(what) > _HEADLINE:
            what = f"{what[:_HEADLINE]}... ({len(what):,} characters; all of them are in the traceback)"
        who = f"rank {self.rank} of {self.world_size}{process}"
        if self.kind == "signal" and what.startswith("killed by "):
            return f"{who} was {what}{place}"
        return f"{who} {_VERBS[self.kind]}{place}: {what}"

    def report(self) -> str:
        """Return the headline, the failed rank's own traceback and, below that, the headline once more."""
        hint = _hint(self)
        lines = [self.headline(), "The other ranks were stopped."]
        if hint:
            lines.append(hint)
        if self.traceback:
            # An error of this package is its message alone.
            lines += [f"Traceback of rank {self.rank}:"] if self.traceback.startswith("Traceback") else []
            lines += ["", self.traceback.rstrip(), "", self.headline()]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> FailureRecord:
        """Return the record that :meth:`to_json` wrote, without characters that steer a terminal.

        Raises:
            ValueError: The text is none.
        """
        given = json.loads(text)
        if not (isinstance(given, dict) and _FIELDS.keys() == given.keys()):
            raise ValueError("it does not have the fields of a failure record")
        for name, kind in _FIELDS.items():
            if not isinstance(given[name], kind) or isinstance(given[name], bool):
                raise ValueError(f"{name} of a failure record is {given[name]!r}")
        if given["kind"] not in get_args(Kind):
            raise ValueError(f"kind of a failure record is {given['kind']!r}")
        texts = {name: _printable(given[name]) for name, kind in _FIELDS.items() if kind is str}
        where = {
            _printable(key): value if isinstance(value, int) else _printable(str(value))
            for key, value in given["where"].items()
        }
        return cls(**{**given, **texts, "where": where})


_FIELDS: dict[str, type] = {
    "rank": int,
    "world_size": int,
    "host": str,
    "pid": int,
    "kind": str,
    "summary": str,
    "traceback": str,
    "where": dict,
    "exit_code": int,
}


def _printable(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")


# How much of a text stands in a headline [characters].
_HEADLINE = 1000
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
    if record.kind == "exception" and any(word in record.summary.lower() for word in _BROKEN):
        return (
            "A collective operation broke, most often because another rank ended; none has reported a failure, so"
            " look at what the program that started the ranks says of them."
        )
    if record.kind == "vanished":
        return "Its process or host ended without reporting an error: look at that host's own logs."
    return ""


def describe_error(
    error: BaseException, rank: int, world_size: int, where: Callable[[], Mapping[str, Any]]
) -> FailureRecord:
    """Return the record of an exception that was raised in this process."""
    kind: Kind = "interrupt" if isinstance(error, KeyboardInterrupt) else "exception"
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
        format_error(error),
        place,
        code,
    )


def _summary(error: BaseException) -> str:
    name, text = type(error).__name__, str(error)
    return f"{name}: {text}".splitlines()[0] if text else name


def is_alike(error: BaseException, record: FailureRecord) -> bool:
    """Return whether ``error`` is of the type that another rank has failed with, and no consequence of that."""
    same_type = record.summary.partition(":")[0] == type(error).__name__
    return same_type and not isinstance(error, SystemExit) and not is_broken_collective(error)


def describe_exit(returncode: int) -> tuple[Kind, str, int]:
    """Return (kind, summary, exit code for the job) for a process's return code, negative for a signal."""
    if returncode < 0:
        return "signal", exit_in_words(returncode), 128 - returncode
    return "exit", exit_in_words(returncode), returncode


def is_broken_collective(error: BaseException) -> bool:
    """Return whether ``error`` is how a backend reports that a peer has exited or did not arrive."""
    if isinstance(error, (DistError, ConnectionError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _BROKEN)
