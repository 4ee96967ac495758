"""A rank is started as the user's program, also from a process that was only sent the program's function."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.hydra import program_arguments


def arguments_in_job(function: FunctionType) -> list[str]:
    """What is found while a job runs ``function`` in a process that has no command line of Hydra."""
    names: dict[str, Any] = {"__name__": "hydra.core.utils"}
    exec("def run_job(task_function, then): return then()", names)
    found: list[str] = names["run_job"](function, lambda: program_arguments("/started/here")[0])
    return found


def sent(file: str, package: str | None) -> FunctionType:
    """A function as cloudpickle makes it of one of the program's script."""
    names = {"__name__": "__main__", "__file__": file, "__package__": package}

    def main() -> None: ...

    function = FunctionType(main.__code__, names, "main")
    function.__module__ = "__main__"
    return function


@pytest.mark.parametrize(
    ("package", "expected"),
    [(None, ["FILE"]), ("", ["-m", "train"]), ("research.app", ["-m", "research.app.train"])],
)
def test_the_script_or_module_of_a_function(package: str | None, expected: list[str], tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.touch()
    expected = [str(file) if part == "FILE" else part for part in expected]
    assert arguments_in_job(sent(str(file), package)) == expected


def test_a_script_that_is_not_on_this_host() -> None:
    with pytest.raises(
        LaunchError, match=r"main\(\) was sent here from /not/here\.py, which is not a file on this host"
    ):
        arguments_in_job(sent("/not/here.py", None))
