"""Every error this package raises on purpose; each is also the built-in one that a reader would expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from lightning_lockstep._text import install_command

__all__ = [
    "BatchSizeError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveStallError",
    "ConfigurationError",
    "LaunchError",
    "LockstepError",
    "MetricMissingError",
    "MissingExtraError",
    "OverflowDetectedError",
    "Preempted",
    "RankFailedError",
    "ReplicaMismatchError",
]


class LockstepError(Exception):
    """Base of every error that lightning-lockstep raises on purpose.

    Ranks: any rank may raise it; catching it needs no communication.
    """


class ConfigurationError(LockstepError, ValueError):
    """A setting cannot be used as given.

    Args:
        faults: One sentence or several. Each says what was given, what was expected and how to fix it.
            Several are shown as a numbered list, so that a user fixes them all in one go.

    Attributes:
        faults: The sentences, in the order given.

    Ranks: raised on every rank, before any of them enters a collective.
    """

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        listed = [f"  {i}. {fault}" for i, fault in enumerate(self.faults, 1)]
        several = "\n".join([f"{len(listed)} settings cannot be used:", *listed])
        super().__init__(self.faults[0] if len(listed) == 1 else several)

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[tuple[str, ...]]]:
        return type(self), (self.faults,)


class MissingExtraError(LockstepError, ImportError):
    """An optional engine is not installed.

    Args:
        package: The package that could not be imported, as it is imported.
        extra: The extra of lightning-lockstep that brings it.
        needed_for: What the user asked for that needs it.

    Ranks: raised on each rank that asks for it; in a run all ranks do.
    """

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        self.package, self.extra, self.needed_for = package, extra, needed_for
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed here."
            f" Install it with: {install_command(extra)}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), extra=self.extra, needed_for=self.needed_for), (self.package,)


class CollectiveError(LockstepError, RuntimeError):
    """The ranks did not all enter the same collective operation.

    Ranks: raised on every rank that took part.
    """


class CollectiveMismatchError(CollectiveError):
    """Ranks called different operations, shapes or dtypes.

    Ranks: raised on every rank, before the operation runs.
    """


class CollectiveStallError(CollectiveError):
    """A rank did not arrive at a collective in time.

    Ranks: raised on every rank that can still be reached.
    """


FailureKind = Literal["exception", "exit", "signal", "vanished", "interrupt", "collective"]


@dataclass(frozen=True)
class FailedRank:
    """What is known about a rank that failed.

    Attributes:
        rank: Its number.
        world_size: Number of ranks in the run.
        host: Host name of its node; empty if it is not known.
        pid: Its process id on that host; 0 if it is not known.
        kind: ``exception``; ``exit`` (ended with a code, nothing more is known); ``signal`` (was killed);
            ``vanished`` (its host or process ended without reporting an error); ``interrupt`` (Ctrl-C);
            ``collective`` (the ranks did not meet in a collective, as rank 0 has found out: it is the rank).
        summary: One line: the error's type and text, the exit code, or the signal.
        traceback: Its traceback as text; empty if there is none.
        where: ``{"epoch": 0, "step": 7, "stage": "train"}`` as far as known; of a process that has ended, where
            the other ranks were.
        exit_code: Exit code for the whole job.
        file: Path of the ``failure.json`` in which rank 0 keeps all this; empty if there is none.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    kind: FailureKind
    summary: str
    traceback: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    exit_code: int = 1
    file: str = ""


class RankFailedError(LockstepError, RuntimeError):
    """Another rank failed, so this one stopped too.

    The text ends with the failed rank's own traceback. ``record`` holds the same facts, a
    :class:`lightning_lockstep.distributed.FailureRecord`, or ``None`` when nothing is known.

    Ranks: raised on every rank but the one that failed; nothing is sent.
    """

    def __init__(self, message: str, record: FailedRank | None = None) -> None:
        super().__init__(message)
        self.record = record

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.record)


class ReplicaMismatchError(LockstepError, RuntimeError):
    """Ranks that should hold the same weights, state and settings do not, or several work on the same data.

    Ranks: raised on every rank, after the same batch.
    """


class OverflowDetectedError(LockstepError, ArithmeticError):
    """A nan or an infinity was found in a forward, a loss, a gradient or an optimizer state.

    Ranks: raised on every rank, after the same batch.
    """


class BatchSizeError(LockstepError, RuntimeError):
    """No batch size fits, or the search for one is not possible here.

    Ranks: raised on every rank.
    """


class MetricMissingError(LockstepError, RuntimeError):
    """A monitored metric was logged by no rank, or not by every rank.

    Ranks: raised on every rank, after all have sent what they have.
    """


class Preempted(SystemExit):
    """All ranks exit together because one was asked to stop; a checkpoint has been saved.

    It ends the program with its exit code, without a traceback, unless the program catches it.

    Args:
        reason: Which rank was asked to stop, and how.
        exit_code: Exit code of every rank.
        checkpoint: File to resume from, if one was saved.

    Ranks: raised on every rank, after the same batch.
    """

    def __init__(self, reason: str = "", exit_code: int = 75, checkpoint: str | None = None) -> None:
        super().__init__(exit_code)
        self.reason, self.checkpoint = reason, checkpoint

    def __str__(self) -> str:
        return self.reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reason, self.code, self.checkpoint)


class LaunchError(LockstepError, RuntimeError):
    """The ranks could not be started, or do not agree on who they are.

    Ranks: raised before the process group exists; on every rank that can know.
    """
