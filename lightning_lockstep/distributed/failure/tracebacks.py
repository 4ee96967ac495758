"""Tracebacks that show the user's own frames, and how many frames of libraries were left out.

A mere look at a command line needs this too, so it imports neither torch nor Lightning.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_lockstep._settings import full_traceback
from lightning_lockstep.errors import LockstepError, RankFailedError

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
    if isinstance(error, SystemExit) and type(error).__module__.startswith(LIGHTNING):
        return ""  # a SIGTERMException is raised at the next boundary of a batch, wherever the signal has arrived
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
