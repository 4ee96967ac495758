"""The backend mpi4py over MPICH, at another thread level, with small pieces, and on more ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.distributed.mpi.launch import run_program, why_no
from tests.models.distributed.mpi.promises import BEHAVIOUR, OPERATIONS, broken

pytestmark = pytest.mark.mpi


def found_by(kind: str, program: str, ranks: int, folder: Path, *arguments: str) -> dict[int, dict[str, Any]]:
    if reason := why_no(kind):
        pytest.skip(reason)
    outcome, found = run_program(kind, ranks, program, folder, arguments=arguments, timeout=300)
    assert outcome.returncode == 0 and len(found) == ranks, outcome.output
    return found


@pytest.mark.parametrize(
    ("kind", "ranks", "arguments"),
    [("open_mpi", 2, ["--all"]), ("open_mpi", 4, ["--all", "--cut"]), ("mpich", 2, ["--all"])],
)
def test_every_operation_gives_what_gloo_gives(
    kind: str, ranks: int, arguments: list[str], tmp_path: Path
) -> None:
    found = found_by(kind, "program_operations.py", ranks, tmp_path, *arguments)
    assert broken(OPERATIONS, found) == {}
    assert found[0]["cases"] > 1000


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("open_mpi", ["--funneled", "--destroy"]),
        ("mpich", ["--watch"]),
    ],
)
def test_it_behaves_as_torch_promises(kind: str, arguments: list[str], tmp_path: Path) -> None:
    found = found_by(kind, "program_behaviour.py", 2, tmp_path, *arguments)
    assert broken(BEHAVIOUR, found) == {}
    assert found[0]["thread level"] == (1 if "--funneled" in arguments else 3)
    assert [json.loads((tmp_path / f"callback-{rank}.json").read_text()) for rank in (0, 1)] == [[2.0]] * 2
