"""Runs first in every Python process that a test starts: keeps lines whole, and has a rank run as a fork.

Python imports ``sitecustomize`` when it starts, if it finds one; ``tests/conftest.py`` puts this folder on PYTHONPATH.
A rank runs as a fork of a process that has imported torch and Lightning, if it can (``fork_start``).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

HERE = os.path.dirname(__file__)


def hand_over() -> None:
    """Run this process's program as a fork, and end as that ends; return if it is to run here."""
    spec = importlib.util.spec_from_file_location("fork_start", os.path.join(HERE, "fork_start.py"))
    assert spec is not None and spec.loader is not None
    sys.modules["fork_start"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.hand_over()


def run_the_one_behind() -> None:
    """Run the ``sitecustomize`` that this one stands in front of, if the machine has one."""
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if entry != HERE])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def write_whole_lines() -> None:
    """Write a printed line in one piece: ranks that share a file would otherwise cut each other's lines."""
    if "LOCKSTEP_TEST_SCRIPT" in os.environ and sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


if __name__ == "sitecustomize":
    if "LOCKSTEP_TEST_FORKS" in os.environ:
        hand_over()
    run_the_one_behind()
    write_whole_lines()
