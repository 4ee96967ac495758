"""Settings checked with all their errors at once, and the environment variables of this package."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from lightning_lockstep.errors import ConfigurationError

# -- The environment variables of this package --
# =========================== ===========================================================
# ``LOCKSTEP_LOG_LEVEL``      level name of the loggers that :func:`get_logger` makes
# ``LOCKSTEP_DEBUG``          ``1`` verifies collectives between ranks before they run
# ``LOCKSTEP_FULL_TRACEBACK`` ``1`` shows all frames of a traceback
# ``LOCKSTEP_JOB_TOKEN``      secret that the ranks of a job share; our launchers set it, under
#                             ``srun`` and ``torchrun`` the job script may
# =========================== ===========================================================
#
# The variables that our launchers set for the ranks they start (``LOCKSTEP_RANK_*``) are private: a user
# neither sets nor reads them.

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
#: Set for ranks that others may outlive.
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
    """Return whether ``LOCKSTEP_DEBUG`` asks for verified collectives."""
    return os.environ.get("LOCKSTEP_DEBUG", "0") not in ("", "0")


def full_traceback() -> bool:
    """Return whether ``LOCKSTEP_FULL_TRACEBACK`` asks for all frames of tracebacks."""
    return os.environ.get("LOCKSTEP_FULL_TRACEBACK", "0") not in ("", "0")


def job_token() -> str | None:
    """Return the secret of this job, or ``None`` if whoever started this process has given none."""
    return os.environ.get(JOB_TOKEN) or None


def launcher_pid() -> int | None:
    """Return the process id of the rank that started this one, or ``None`` if nobody of ours did."""
    given = os.environ.get(LAUNCHER_PID)
    return int(given) if given else None


def restore_variables(before: Mapping[str, str | None]) -> None:
    """Give environment variables the values that they had before; ``None`` unsets one."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# -- What is wrong with settings, collected and raised as one error --
# Every settings class checks itself with a :class:`Faults` on construction, so that a user sees all that is
# wrong at once, each error in the same form: ``name=value: expected ... .``

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
        hint = (
            did_you_mean(given, [c for c in choices if isinstance(c, str)]) if isinstance(given, str) else ""
        )
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
        most: float | None = None,
        such_as: object = None,
        optional: bool = False,
    ) -> bool:
        """Check a finite number."""
        bounds = [
            (bound, holds, text.format(bound))
            for bound, holds, text in (
                (least, operator.ge, "{} or more"),
                (above, operator.gt, "more than {}"),
                (below, operator.lt, "less than {}"),
                (most, operator.le, "at most {}"),
            )
            if bound is not None
        ]
        is_right = is_number(given) and all(holds(given, bound) for bound, holds, _ in bounds)
        expected = ", ".join(filter(None, [what, " and ".join(text for _, _, text in bounds)]))
        return self.check(
            is_right or (optional and given is None), name, given, _with_example(expected, such_as, optional)
        )

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
        return self.check(
            is_right or (optional and given is None), name, given, _with_example(expected, such_as, optional)
        )

    def flag(self, name: str, given: object, *, optional: bool = False) -> bool:
        """Check a truth value."""
        is_right = isinstance(given, bool) or (optional and given is None)
        return self.check(is_right, name, given, "true or false" + (", or None" if optional else ""))

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
        """Raise what was collected."""
        if self.texts:
            raise ConfigurationError(self.texts)


def settings_of(cls: type[_Settings], given: Mapping[str, Any]) -> _Settings:
    """Return the settings of a class out of values by name; what is none of its fields is left out."""
    # A constructor gives it ``locals()``: a test holds its signature to the names, types and defaults of the
    # fields.
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    return cls(**{field.name: given[field.name] for field in fields if field.name in given})


def did_you_mean(given: str, known: Iterable[str], *, most: int = 2) -> str:
    """Return `` Did you mean 'this' or 'that'?`` with the nearest known names, or nothing if none is near."""
    near = _near(given, known, most)
    return " Did you mean " + " or ".join(map(repr, near)) + "?" if near else ""


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to ``given``, or ``None`` if none is near."""
    return next(iter(_near(given, known, 1)), None)


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


# What Lightning and other trainers call things whose names here look different, and those names.
_CALLED_ELSEWHERE = {
    "fp16 float16 half amp mixed": ("16-mixed", "precision"),
    "bf16 bfloat16": ("bf16-mixed",),
    "fp32 float32": ("32-true",),
    "fp64 float64 double": ("64-true",),
    "none null false auto cpu": ("none", "default", "single"),
    "deepspeed zero zero2 zero_2": ("deepspeed_stage_2",),
    "zero3 zero_3": ("deepspeed_stage_3",),
    "full_shard": ("fsdp",),
    "zero1 zero_1": ("deepspeed_stage_1",),
    "horovod": ("mpi",),
    "tpu": ("xla",),
    "tb": ("tensorboard",),
    "weights_and_biases": ("wandb",),
    "gpus num_gpus num_processes nproc world_size ranks": ("devices",),
    "epochs num_epochs num_train_epochs": ("max_epochs",),
    "steps num_steps": ("max_steps",),
    "resume resume_from_checkpoint checkpoint_path": ("ckpt_path",),
    "gradient_accumulation_steps grad_accum": ("accumulate_grad_batches",),
    "grad_clip max_grad_norm clip_grad_norm": ("gradient_clip_val",),
    "lr": ("learning_rate",),
    "monitor": ("metric",),
    "direction": ("mode",),
    "train do_train": ("fit",),
    "eval do_eval": ("validate",),
    "nan inf": ("overflow",),
}


def _near(given: str, known: Iterable[str], most: int) -> list[str]:
    words, names = _words(given), {name: _words(name) for name in known}
    plain = "_".join(words)
    if not plain:
        return []
    joined = {"_".join(its): name for name, its in names.items()}
    close = [joined[name] for name in difflib.get_close_matches(plain, joined, n=most, cutoff=0.6)]
    found = [name for name, its in names.items() if its == words]
    # `train` is nearer to trainer than to what others call so, but `epochs` not to min_epochs.
    found = found or (close if difflib.get_close_matches(plain, joined, n=1, cutoff=0.8) else [])
    meant = [those for called, those in _CALLED_ELSEWHERE.items() if plain in called.split()]
    found = found or [name for those in meant for name in those if name in names]
    # wd, bs, whichever of the two it is; what is called so elsewhere means nothing else
    found = found or [
        name
        for name, its in names.items()
        if (plain == _initials(its) and not meant) or (len(words) > 1 and "_".join(its) == _initials(words))
    ]
    found = found or close or [name for name in names if name.lower().startswith(given.lower())]
    # `ddp_spawn` for ddp, `gpt` for byte_gpt: all words of one are words of the other.
    return (
        found
        or [name for name, its in names.items() if its and (set(its) <= set(words) or set(words) <= set(its))]
    )[:most]


def _words(name: str) -> list[str]:
    """The words of a name in lower case, however they are joined: `early_stopping`, `EarlyStopping`."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    words = re.split(r"[\W_]+", parted.lower())
    return [word for word in words if word and word != "lockstep"]


def _initials(words: Iterable[str]) -> str:
    return "".join(word[0] for word in words)


def _with_example(expected: str, such_as: object, optional: bool) -> str:
    text = expected if such_as is None else f"{expected}, such as {such_as}"
    return f"{text}, or None" if optional else text
