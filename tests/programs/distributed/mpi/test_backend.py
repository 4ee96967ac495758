"""The backend mpi4py against gloo and against what torch.distributed promises, on real MPI ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import run_ranks
from tests.models.distributed.every_operation import PARTS
from tests.models.distributed.mpi.launch import run_program
from tests.models.distributed.mpi.promises import BEHAVIOUR, OPERATIONS, broken, guarded

pytestmark = pytest.mark.mpi


def found_by(program: str, ranks: int, folder: Path, *arguments: str) -> dict[int, dict[str, Any]]:
    outcome, found = run_program("open_mpi", ranks, program, folder, arguments=arguments)
    assert outcome.returncode == 0 and len(found) == ranks, outcome.output
    return found


def test_every_operation_gives_what_gloo_gives_in_groups_too(tmp_path: Path) -> None:
    assert broken(OPERATIONS, found_by("program_operations.py", 3, tmp_path)) == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("behaviour")
    found_by("program_behaviour.py", 2, folder)
    return folder


def seen_in(folder: Path) -> Mapping[int, Any]:
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)}


@pytest.mark.parametrize("what", BEHAVIOUR)
def test_it_behaves_as_torch_promises(what: str, folder: Path) -> None:
    found = seen_in(folder)
    assert found[0]["name"] == "mpi4py" and found[0]["thread level"] == 3
    assert broken({what: BEHAVIOUR[what]}, found) == {}


def test_a_callback_that_is_under_way_at_the_end_of_the_program_returns(folder: Path) -> None:
    assert [json.loads((folder / f"callback-{rank}.json").read_text()) for rank in (0, 1)] == [[2.0]] * 2


def over_gloo() -> list[Any]:
    return [part(dist.get_rank()) for part in PARTS]


def test_under_the_guard_every_operation_runs_as_without_and_as_over_gloo(folder: Path) -> None:
    assert broken(guarded(run_ranks(2, over_gloo)), seen_in(folder)) == {}
