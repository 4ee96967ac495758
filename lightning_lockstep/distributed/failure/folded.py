"""Tracebacks that show the user's own frames, and of torch, Lightning, Hydra and this package how many there were."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_lockstep._environment import full_traceback
from lightning_lockstep.errors import LockstepError, RankFailedError

__all__ = ["format_error", "has_plain_message", "user_function"]

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
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


def has_plain_message(error: BaseException) -> bool:
    """Return whether the message of ``error`` says all that a reader needs: it is one of this package's own."""
    return (
        isinstance(error, LockstepError) and not isinstance(error, RankFailedError) and not full_traceback()
    )


def format_error(error: BaseException) -> str:
    """Return the traceback of ``error`` as text that ends with a newline.

    Frames of torch, Lightning, Hydra and this package that follow each other are one line, but for the frame that
    raised. An error of this package is its message alone. ``LOCKSTEP_FULL_TRACEBACK=1`` shows all there is.
    """
    if full_traceback():
        return "".join(traceback.format_exception(error))
    if has_plain_message(error):
        return "".join(traceback.format_exception_only(type(error), error))
    return "".join(_lines(traceback.TracebackException.from_exception(error)))


def user_function(error: BaseException) -> str | None:
    """Return the name of the user's function that Lightning called and that raised, such as ``training_step``."""
    inside = False
    for frame in traceback.extract_tb(error.__traceback__):
        package = _package_of(frame.filename)
        if inside and package is None:
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
