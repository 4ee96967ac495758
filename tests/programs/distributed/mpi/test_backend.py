"""The backend mpi4py against gloo and against what torch.distributed promises, on real MPI ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import run_ranks
from tests.models.distributed.every_operation import PARTS
from tests.models.distributed.mpi.behaviour import PROMISES, as_guarded, behaviour, broken
from tests.models.distributed.mpi.launch import run_mpi
from tests.models.distributed.mpi.operations import OPERATIONS, operations

pytestmark = pytest.mark.mpi
Seen = tuple[list[dict[str, Any]], Path]


def test_every_operation_gives_what_gloo_gives_in_groups_too() -> None:
    assert broken(OPERATIONS, run_mpi(3, operations)) == {}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("behaviour")
    return run_mpi(2, behaviour, folder), folder


@pytest.mark.parametrize("what", PROMISES)
def test_it_behaves_as_torch_promises(what: str, seen: Seen) -> None:
    found, _ = seen
    assert found[0]["name"] == "mpi4py" and found[0]["thread level"] == 3
    assert broken({what: PROMISES[what]}, found) == {}


def test_a_callback_that_is_under_way_at_the_end_of_the_program_returns(seen: Seen) -> None:
    assert [(seen[1] / f"callback-{rank}").read_text() for rank in (0, 1)] == ["2.0", "2.0"]


def over_gloo() -> list[Any]:
    return [part(dist.get_rank()) for part in PARTS]


def test_under_the_guard_every_operation_runs_as_without_and_as_over_gloo(seen: Seen) -> None:
    assert broken(as_guarded(run_ranks(2, over_gloo)), seen[0]) == {}
