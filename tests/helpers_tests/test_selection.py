"""What counts as slow, and what is kept in one worker."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.distributed.mpi.launch import run_program
from tests.helpers import run_ranks, run_script
from tests.helpers.selection import group_of, starts_programs


def a_helper() -> None:
    run_script([sys.executable, "-c", ""])


@pytest.fixture
def a_fixture() -> None:
    subprocess.run(["true"], check=True)


@pytest.fixture(scope="module")
def shared() -> int:
    return 1


def a_test_of_values() -> None:
    assert len("abc") == 3


def a_test_of_ranks() -> None:
    run_ranks(2, a_test_of_values)


def a_test_with_a_helper() -> None:
    [a_helper() for _ in range(2)]


def a_test_with_a_fixture(a_fixture: None) -> None: ...


def a_test_with_a_shared_fixture(shared: int) -> None: ...


def a_test_under_mpi() -> None:
    run_program("open_mpi", 2, "program.py", folder=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "slow", "group"),
    [
        (a_test_of_values, False, None),
        (a_test_of_ranks, False, None),
        (a_test_with_a_helper, True, None),
        (a_test_with_a_fixture, True, None),
        (a_test_with_a_shared_fixture, False, "tests/helpers_tests/test_selection.py"),
        (a_test_under_mpi, True, "mpi"),
    ],
)
def test_what_a_test_starts_and_shares(request, function, slow, group) -> None:
    item = pytest.Function.from_parent(request.node.parent, name=function.__name__, callobj=function)
    assert starts_programs(item) == slow
    found = group_of(item)
    assert found == group or (group and found and found.endswith(group))


@pytest.mark.xdist_group("here")
def test_a_group_stays_in_one_worker(request) -> None:
    """pytest-xdist groups by what it has put behind the name of the test; a pytest it does not know loses that."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there are no workers")
    assert request.node.nodeid.endswith("@here")
