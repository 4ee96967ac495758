"""What counts as slow, and what is kept in one worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.mpi.launch import run_program
from tests.helpers import run_ranks, run_script
from tests.helpers.selection import group_of, starts_programs, without_group


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


GROUPED = """
import pytest

@pytest.mark.xdist_group("mpi")
@pytest.mark.parametrize("address", ["user@host"])
def test_fails(address):
    assert False

@pytest.mark.parametrize("address", ["user@host"])
def test_passes(address):
    pass
"""


def test_a_failed_test_of_a_group_is_the_one_that_runs_once_more(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_logreport")
    (tmp_path / "test_some.py").write_text(GROUPED)

    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    def pytest_(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *arguments, "test_some.py"],
            cwd=tmp_path,
            env={**env, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout

    first = pytest_("-n", "1", "--dist", "loadgroup")
    assert "FAILED test_some.py::test_fails[user@host] - " in first, first
    again = pytest_("-n", "0", "--last-failed", "--collect-only")
    assert [line for line in again.splitlines() if "::" in line] == ["test_some.py::test_fails[user@host]"]


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("tests/a/test_b.py::test_c", "tests/a/test_b.py::test_c"),
        ("tests/a/test_b.py::test_c@mpi", "tests/a/test_b.py::test_c"),
        ("tests/a/test_b.py::test_c[x@y]", "tests/a/test_b.py::test_c[x@y]"),
        ("tests/a/test_b.py::test_c[x@y]@tests/a/test_b.py", "tests/a/test_b.py::test_c[x@y]"),
        ("tests/a/test_b@2.py::test_c", "tests/a/test_b@2.py::test_c"),
    ],
)
def test_the_name_of_a_test_without_its_group(reported: str, name: str) -> None:
    assert without_group(reported) == name
