"""Runs first in every Python process of the tests: saves imports, and keeps the lines of ranks whole.

Lightning imports torchmetrics, which imports scipy, matplotlib and transformers if they are installed: half of
the CPU time of ``import lightning``. They are hidden from torchmetrics alone, while it is imported; whoever
imports them (scikit-learn its scipy, a test its transformers) finds them. torch's compiler, another third, waits
until something is compiled (:mod:`lazy_dynamo`). ``LOCKSTEP_TESTS_SHOW_ALL=1`` in the environment of a process
turns both off. A rank runs as a fork of a process that has all that behind it, where it can (:mod:`fork_start`).

Python imports ``sitecustomize`` at start-up where it finds one; ``tests/conftest.py`` puts this folder on
PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

HIDDEN = frozenset({"matplotlib", "regex", "scipy", "transformers"})


def torchmetrics_is_being_imported() -> bool:
    """Whether its import has begun and not ended; the flag is the one that the import system keeps itself."""
    module = sys.modules.get("torchmetrics")
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class Finder(PathFinder):
    """Finds what the ordinary finder finds, except for the hidden packages while torchmetrics is imported."""

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname in HIDDEN and torchmetrics_is_being_imported():
            return None
        if (
            fullname.startswith("torch._dynamo")
            and (spec := beside("lazy_dynamo").spec_of(fullname)) is not None
        ):
            return spec
        return super().find_spec(fullname, path, target)  # type: ignore[arg-type]

    @classmethod
    def find_distributions(cls, *args: object, **options: object) -> Iterable[object]:
        found = super().find_distributions(*args, **options)
        # Names are asked for only then: each costs reading a file.
        if torchmetrics_is_being_imported():
            return (distribution for distribution in found if distribution.name not in HIDDEN)
        return found


def beside(name: str) -> Any:
    """Return the module beside this one, whatever the path of the process."""
    if name not in sys.modules:
        file = os.path.join(os.path.dirname(__file__), f"{name}.py")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def hide() -> None:
    """Put the finder in the place of the ordinary one, once."""
    if PathFinder in sys.meta_path and not os.environ.get("LOCKSTEP_TESTS_SHOW_ALL"):
        sys.meta_path[sys.meta_path.index(PathFinder)] = Finder


def run_the_one_behind() -> None:
    """Run the ``sitecustomize`` that this one stands in front of, if the machine has one."""
    here = os.path.dirname(__file__)
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if entry != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def write_whole_lines() -> None:
    """Write a printed line in one piece: ranks that share a file would otherwise cut each other's lines."""
    if "LOCKSTEP_TEST_SCRIPT" in os.environ and sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


if __name__ == "sitecustomize":
    if "LOCKSTEP_TEST_FORKS" in os.environ:
        beside("fork_start").hand_over()
    run_the_one_behind()
    hide()
    write_whole_lines()
