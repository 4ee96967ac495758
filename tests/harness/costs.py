"""What a test may start, by the folder that it is in, and how long it may take.

====================== ======================================================================= ======================
folder                 what its tests start                                                    when they run
====================== ======================================================================= ======================
``tests/unit``         nothing: all is in the process of pytest                                ``scripts/test``
``tests/ranks``        groups of ranks, forked from a process that has imported Lightning      ``scripts/test``
``tests/programs``     programs as a user starts them: a script, a command, mpirun, torchrun   ``scripts/test``
``tests/variants``     each way of starting with each failure, and what else has many cases    ``scripts/test --all``
``tests/environments`` what needs one: Slurm, two hosts, Ray, a browser, torch-xla, a shell    ``scripts/test --all``
====================== ======================================================================= ======================

A test of the first three folders has a budget: what it takes with its setup, and with that of a fixture which it
shares with others if it is the first of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDERS = ("unit", "ranks", "programs", "variants", "environments")
#: The folders that ``scripts/test`` runs without arguments.
DEFAULT = FOLDERS[:3]
#: Seconds that a test of these may take.
BUDGET = 15.0

_STARTS = {"ranks": FOLDERS[1:], "programs": FOLDERS[2:]}
_running: pytest.Item | None = None


def folder_of(path: Path) -> str:
    """Return which of the folders a file is in; ``""`` for a file elsewhere, as those that tests write."""
    parts = path.parts
    names = [parts[i + 1] for i in range(len(parts) - 1) if parts[i] == "tests"]
    return names[-1] if names and names[-1] in FOLDERS else ""


def begin(item: pytest.Item | None) -> None:
    """Note the test that begins (``None``: it has ended)."""
    global _running
    _running = item


def may_start(what: str) -> None:
    """Fail a test that starts ``ranks`` or ``programs`` in a folder which says that it does not."""
    folder = folder_of(_running.path) if _running is not None else ""
    if folder and folder not in _STARTS[what]:
        pytest.fail(
            f"a test of tests/{folder} starts {what}: its place is tests/{what}, or it does without",
            pytrace=False,
        )


def starts_mpi() -> None:
    """Fail a test that starts ranks under MPI without the mark by which such tests run one after the other."""
    if _running is not None and not _running.get_closest_marker("mpi"):
        pytest.fail("a test starts ranks under MPI without @pytest.mark.mpi", pytrace=False)


def group_of(item: pytest.Item) -> str | None:
    """Return the group of tests that run one after the other in one worker, if the test needs one."""
    # A rank under MPI spins while it waits, and two jobs at a time would only keep each other from their
    # work; there is one Slurm at a time; and a fixture of a module would be made by each worker.
    if item.get_closest_marker("mpi"):
        return "mpi"
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    if "slurm" in known:
        return "slurm"
    if any(definitions[-1].scope == "module" for definitions in known.values() if definitions):
        return item.nodeid.partition("::")[0]
    return None


def without_group(nodeid: str) -> str:
    """Return the name of a test without the group that pytest-xdist adds, as in ``test_x.py::test_y[1]@mpi``."""
    name, _, group = nodeid.rpartition("@")
    return name if "::" in name and "]" not in group else nodeid
