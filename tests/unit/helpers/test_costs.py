"""What a test may start follows from its folder, and what a run came to from its reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import costs, run_ranks, run_script
from tests.helpers.costs import folder_of, without_group

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/home/me/tests/unit/steps/test_x.py", "unit"),
        ("/tests/project/tests/sites/xla/test_x.py", "sites"),
        ("/home/me/tests/soak/test_x.py", ""),
        ("/tmp/test_x.py", ""),
    ],
)
def test_the_folder_of_a_file(path: str, folder: str) -> None:
    assert folder_of(Path(path)) == folder


def test_a_test_of_this_folder_starts_nothing() -> None:
    for start in (lambda: run_ranks(1, print), lambda: run_script([sys.executable, "-c", "pass"])):
        with pytest.raises(pytest.fail.Exception, match=r"a test of tests/unit starts (ranks|programs)"):
            start()
    with pytest.raises(pytest.fail.Exception, match="without @pytest"):
        costs.starts_mpi()


@pytest.mark.parametrize(
    ("with_group", "name"),
    [
        ("tests/a/test_b.py::test_c", "tests/a/test_b.py::test_c"),
        ("tests/a/test_b.py::test_c@mpi", "tests/a/test_b.py::test_c"),
        ("tests/a/test_b.py::test_c[x@y]", "tests/a/test_b.py::test_c[x@y]"),
        ("tests/a/test_b.py::test_c[x@y]@tests/a/test_b.py", "tests/a/test_b.py::test_c[x@y]"),
    ],
)
def test_a_name_without_the_group_of_xdist(with_group: str, name: str) -> None:
    assert without_group(with_group) == name


def case(name: str, seconds: float, inside: str = "") -> str:
    return f'<testcase classname="tests.unit.helpers.test_costs" name="{name}" time="{seconds}">{inside}</testcase>'


FAILED = '<failure message="assert 1 == 2">the traceback</failure>'
FIRST = [
    case("passes", 1.0),
    case("fails", 1.0, FAILED),
    case("unsteady", 1.0, FAILED),
    case("slow", 16.0),
    case("slow once", 16.0),
    case("no card", 0.0, '<skipped message="there is no GPU"/>'),
    case("no shell", 0.0, '<skipped message="there is no zsh"/>'),
]
ALONE = [case("fails", 1.0, FAILED), case("unsteady", 1.0), case("slow", 15.5), case("slow once", 3.0)]


def reported(
    folder: Path, first: list[str], alone: list[str], *options: str, ci: str = ""
) -> tuple[int, str]:
    report = folder / "1.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(first)}</testsuite></testsuites>")
    (folder / "1.xml.alone").write_text(f"<testsuite>{''.join(alone)}</testsuite>")
    command = [
        sys.executable,
        "-P" if sys.version_info >= (3, 11) else "-s",
        str(ROOT / "scripts/test_report.py"),
    ]
    done = subprocess.run(
        [*command, *options, str(report)], capture_output=True, text=True, timeout=60, env={"CI": ci}
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_what_runs_twice(tmp_path: Path) -> None:
    _, text = reported(tmp_path, FIRST, [], "--twice")
    names = ["fails", "unsteady", "slow", "slow once"]
    assert text.splitlines() == [f"tests/unit/helpers/test_costs.py::{name}" for name in names]


def test_nothing_is_silent(tmp_path: Path) -> None:
    code, text = reported(tmp_path, FIRST, ALONE)
    assert code == 1
    assert text.splitlines()[-1] == (
        "test: 3 passed, 2 skipped (1 of them for want of something that can be installed), 1 over budget, "
        "1 passed only alone, 1 failed"
    )
    assert "1 x there is no zsh" in text and "FAILURE assert 1 == 2" in text


@pytest.mark.parametrize(
    ("case", "in_ci"),
    [(0, 0), (2, 0), (3, 1), (5, 0), (6, 1)],
    ids=["passes", "unsteady", "slow", "card", "shell"],
)
def test_what_is_only_said_elsewhere_fails_in_ci(case: int, in_ci: int, tmp_path: Path) -> None:
    assert reported(tmp_path, [FIRST[case]], ALONE)[0] == 0
    assert reported(tmp_path, [FIRST[case]], ALONE, ci="true")[0] == in_ci


def test_a_run_without_tests_has_failed(tmp_path: Path) -> None:
    code, text = reported(tmp_path, [], [])
    assert code == 1 and "did not come to its end" in text
