"""Settings checked with all their errors at once, and the environment variables of this package."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from lightning_lockstep.errors import ConfigurationError

# -- The environment variables of this package: docs/environment.md has those for users, the others are private --

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

#: The secret by which the ranks of a job know each other.
JOB_TOKEN = "LOCKSTEP_JOB_TOKEN"
#: Set by our process launcher in each rank it starts: the process id of the launching rank.
LAUNCHER_PID = "LOCKSTEP_RANK_LAUNCHER_PID"
#: Set by the first rank of a node in its own environment once it has met the others: its process id.
HAS_MET = "LOCKSTEP_RANK_HAS_MET"
#: Set by our mpirun launcher: the folder in which ranks of its host note that they end in good order.
NOTES_FOLDER = "LOCKSTEP_RANK_NOTES_FOLDER"
#: Set by our launchers for ranks of a Hydra job: its configuration. Gone once a rank has it.
RANK_CONFIG = "LOCKSTEP_RANK_CONFIG"
#: Set for ranks that others may outlive: the number of the rank, or of the spare process, at the start.
MEMBER = "LOCKSTEP_RANK_MEMBER"


def log_level() -> str | None:
    """Return ``LOCKSTEP_LOG_LEVEL`` in upper case, or ``None`` when it is not set."""
    given = os.environ.get("LOCKSTEP_LOG_LEVEL")
    if not given:
        return None
    if given.upper() not in LEVELS:
        raise ConfigurationError(
            f"The environment variable LOCKSTEP_LOG_LEVEL is {given!r}; expected one of {', '.join(LEVELS)}."
        )
    return given.upper()


def debug() -> bool:
    return os.environ.get("LOCKSTEP_DEBUG", "0") not in ("", "0")


def full_traceback() -> bool:
    return os.environ.get("LOCKSTEP_FULL_TRACEBACK", "0") not in ("", "0")


def launcher_pid() -> int | None:
    """Return the process id of the rank that started this one, or ``None`` if nobody of ours did."""
    import psutil

    pid = int(os.environ.get(LAUNCHER_PID) or 0)
    # Of a process that still runs and is not the parent, the variable is left over from another job.
    return pid if pid and (pid == os.getppid() or not psutil.pid_exists(pid)) else None


def restore_variables(before: Mapping[str, str | None]) -> None:
    """Give environment variables the values that they had before; ``None`` unsets one."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# -- What is wrong with settings, collected and raised as one error --

_Settings = TypeVar("_Settings")


class Faults:
    """Collects what is wrong with a set of settings."""

    def __init__(self, owner: str = "") -> None:
        self._before = f"{owner}: " if owner else ""  # if the names alone do not say whose they are
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Add an error in full: what was given, what was expected, how to fix it."""
        self.texts.append(self._before + text)

    def check(self, is_right: bool, name: str, given: object, expected: str) -> bool:
        """Add ``name=given: expected <expected>.`` unless it is right; returns whether it is."""
        if not is_right:
            self.add(f"{name}={given!r}: expected {expected}.")
        return is_right

    def choice(self, name: str, given: object, choices: Sequence[object], *, more: str = "") -> bool:
        """Check that a value is one of several, or what ``more`` says in words (``or a function``)."""
        if any(given is choice or given == choice for choice in choices):
            return True
        listed = " ".join(filter(None, [", ".join(map(repr, choices)), more]))
        hint = did_you_mean(str(given), (choice for choice in choices if isinstance(choice, str)))
        self.add(f"{name}={given!r}: expected one of {listed}.{hint}")
        return False

    def number(
        self,
        name: str,
        given: object,
        *,
        what: str = "a number",  # with its unit, such as ``seconds``
        least: float | None = None,
        above: float | None = None,
        below: float | None = None,
        such_as: object = None,
    ) -> bool:
        limits = ((least, "{} or more"), (above, "more than {}"), (below, "less than {}"))
        bounds = " and ".join(text.format(limit) for limit, text in limits if limit is not None)
        is_right = (
            is_number(given)
            and (least is None or given >= least)
            and (above is None or given > above)
            and (below is None or given < below)
        )
        expected = f"{what}, {bounds}" if bounds else what
        return self.check(is_right, name, given, _with_example(expected, such_as))

    def whole(
        self,
        name: str,
        given: object,
        *,
        least: int = 1,
        most: int | None = None,
        what: str = "a whole number",
        such_as: object = None,
        optional: bool = False,
    ) -> bool:
        """Check a whole number; ``True`` and ``False`` are none."""
        is_right = is_whole(given) and given >= least and (most is None or given <= most)
        expected = f"{what} from {least}" + ("" if most is None else f" to {most}")
        expected = _with_example(expected, such_as) + (", or None" if optional else "")
        return self.check(is_right or (optional and given is None), name, given, expected)

    def list_of(self, name: str, given: Any, is_right: Callable[[Any], bool], expected: str) -> bool:
        """Check a list and each of its items; text is no list."""
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        return self.check(is_list and all(map(is_right, given)), name, given, expected)

    def flag(self, name: str, given: object) -> bool:
        return self.check(isinstance(given, bool), name, given, "true or false")

    def fields(self, settings: object) -> None:
        """Check each field of a dataclass that its type makes a truth value, or one of several values."""
        for name, kind in get_type_hints(type(settings)).items():
            if get_origin(kind) is Literal:
                self.choice(name, getattr(settings, name), get_args(kind))
            elif kind is bool:
                self.flag(name, getattr(settings, name))

    def unknown(self, given: Iterable[str], known: Iterable[str], *, owner: str) -> None:
        """Add an error for each name that is not known, with the nearest right ones."""
        names = list(known)
        for name in given:
            if name not in names:
                near = did_you_mean(name, names) or f" It takes {', '.join(sorted(names))}."
                self.add(f"{owner} has no option {name!r}.{near}")

    def raise_all(self) -> None:
        if self.texts:
            raise ConfigurationError(self.texts)


def settings_of(cls: type[_Settings], given: Mapping[str, Any]) -> _Settings:
    """Return the settings of a class out of values by name; what is none of its fields is left out."""
    # A constructor gives it ``locals()``: a test holds its signature to the names, types and defaults of the fields.
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    return cls(**{field.name: given[field.name] for field in fields if field.name in given})


def did_you_mean(given: str, known: Iterable[str], *, most: int = 2) -> str:
    """Return `` Did you mean 'this' or 'that'?`` with the nearest known names, or nothing if none is near."""
    near = nearest(given, known, most=most)
    return " Did you mean " + " or ".join(map(repr, near)) + "?" if near else ""


def nearest(given: str, known: Iterable[str], *, most: int = 2) -> list[str]:
    """Return the known names that are spelt most like ``given``, in either case; none if none is near."""
    names = {name.lower(): name for name in known}
    return [names[name] for name in difflib.get_close_matches(given.lower(), names, n=most)]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number; truth values are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is a whole number; truth values are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def plain_number(value: Any) -> Any:
    """Return a number of another library, such as NumPy, as Python's own; anything else as it is."""
    if type(value) in (bool, int, float) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _with_example(expected: str, such_as: object) -> str:
    return expected if such_as is None else f"{expected}, such as {such_as}"
