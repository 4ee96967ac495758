"""Which checks a command line asks for, and which of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_lockstep._settings import did_you_mean
from lightning_lockstep.doctor.findings import Status
from lightning_lockstep.doctor.registry import NOT_BY_DEFAULT, check_names
from lightning_lockstep.errors import ConfigurationError

__all__ = ["Selection", "select"]

# Its arguments are folders.
_TAKES_FOLDERS = "run"


@dataclass(frozen=True)
class Selection:
    """What a command line asks for."""

    names: tuple[str, ...]  # in the order in which they are started
    folders: tuple[str, ...] = ()  # of runs
    least: Status = Status.NOT_APPLICABLE  # only rows of this status or a worse one are shown


def select(arguments: Sequence[str], only: str | None = None) -> Selection:
    """Return what arguments ask for; without names all checks that need no arguments."""
    known = check_names()
    statuses = {status.value: status for status in Status}
    wanted = [name for name in (only or "").split(",") if name]
    least = [statuses[name] for name in wanted if name in statuses]
    names, folders = [], []
    for argument in [*arguments, *(name for name in wanted if name not in statuses)]:
        if argument in known:
            names.append(argument)
        elif _TAKES_FOLDERS in names:
            folders.append(argument)
        else:
            _raise_unknown(argument, known)
    chosen = list(dict.fromkeys(names)) or [name for name in known if name not in NOT_BY_DEFAULT]
    return Selection(
        tuple(sorted(chosen, key=known.index)),
        tuple(folders),
        min(least, key=lambda status: status.severity, default=Status.NOT_APPLICABLE),
    )


def _raise_unknown(name: str, known: Sequence[str]) -> None:
    raise ConfigurationError(
        f"check {name!r}: expected one of {', '.join(known)}.{did_you_mean(name, known)}"
    )
