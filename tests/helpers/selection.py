"""Which tests start programs, and which belong together: found in their code, so that nobody keeps a list."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import pytest

#: What starts an interpreter (one that imports torch and Lightning takes seconds), or a program that does.
STARTERS = frozenset({"Popen", "Script", "run_script", "start_script", "subprocess"})
#: What starts ranks under MPI.
MPI_STARTERS = frozenset({"mpi_command", "mpi_environ"})


def starts_programs(item: pytest.Item) -> bool:
    """Whether a test starts a program; ranks that are forked from the server do not count."""
    return _reaches(item, STARTERS)


def group_of(item: pytest.Item) -> str | None:
    """Return the group of tests that run one after the other in one worker, if the test needs one.

    Tests that start ranks under MPI, those on two hosts among them: such a rank spins while it waits, and two
    jobs at a time would only keep each other from their work. Tests on a Slurm, of which there is one at a time.
    Tests that share a fixture of their module: another worker would make a second one.
    """
    fixtures = getattr(item, "fixturenames", ())
    if "slurm" in fixtures:
        return "slurm"
    if "cluster" in fixtures or _reaches(item, MPI_STARTERS):
        return "mpi"
    if any(fixture.scope == "module" for fixture in _fixtures(item)):
        return item.nodeid.partition("::")[0]
    return None


def without_group(nodeid: str) -> str:
    """Return the name of a test without the group that pytest-xdist adds, as in ``test_x.py::test_y[1]@mpi``."""
    name, _, group = nodeid.rpartition("@")
    return name if "::" in name and "]" not in group else nodeid


def _reaches(item: pytest.Item, names: frozenset[str]) -> bool:
    """Whether a test, a function of the tests that it calls or a fixture that it asks for uses one of the names."""
    seen: set[FunctionType] = set()
    functions = [getattr(item, "function", None), *(fixture.func for fixture in _fixtures(item))]
    return any(_uses(function, names, seen) for function in functions)


def _fixtures(item: pytest.Item) -> list[pytest.FixtureDef[Any]]:
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return [definitions[-1] for definitions in known.values() if definitions]


def _uses(thing: Any, names: frozenset[str], seen: set[FunctionType]) -> bool:
    function = inspect.unwrap(thing) if callable(thing) else None
    if not isinstance(function, FunctionType) or function in seen:
        return False
    if not function.__module__.startswith("tests.") or function.__module__.startswith("tests.helpers."):
        return False  # the helpers themselves start the process that ranks are forked from
    seen.add(function)
    used = _names(function.__code__)
    return bool(used & names) or any(_uses(function.__globals__.get(name), names, seen) for name in used)


def _names(code: Any) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if inspect.iscode(constant)]
    return set(code.co_names).union(*inner)
