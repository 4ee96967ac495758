"""Which program this process is, as far as an import of the package has to know."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import PurePath

__all__ = ["is_doctor"]

_COMMAND = "lockstep-doctor"
_MODULE = "lightning_lockstep.doctor"


def is_doctor() -> bool:
    """Return whether this process is the doctor, or one that it has started.

    The doctor has to answer where torch or Lightning cannot be imported, and at once where they can. So the
    package registers no strategies in its processes, which would import both.
    """
    program = sys.argv[0] if sys.argv else ""
    if program != "-m":  # what Python puts there until it has found the module of `python -m`
        return PurePath(program).name == _COMMAND
    return any(_is_of_the_doctor(name) for name in _module_of_this_program())


def _module_of_this_program() -> list[str]:
    given = sys.orig_argv
    return [after for option, after in pairwise(given) if option == "-m"][:1]


def _is_of_the_doctor(module: str) -> bool:
    return module == _MODULE or module.startswith(f"{_MODULE}.")
