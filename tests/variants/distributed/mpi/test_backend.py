"""The backend mpi4py over MPICH, at another thread level, with small pieces, and on more ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.distributed.mpi.behaviour import PROMISES, behaviour, broken
from tests.models.distributed.mpi.launch import run_mpi, why_no
from tests.models.distributed.mpi.operations import OPERATIONS, operations

pytestmark = pytest.mark.mpi


def needs(kind: str) -> None:
    if reason := why_no(kind):
        pytest.skip(reason)


@pytest.mark.parametrize(("kind", "ranks", "cut"), [("open_mpi", 2, False), ("open_mpi", 3, True), ("mpich", 2, False)])
def test_every_operation_gives_what_gloo_gives(kind: str, ranks: int, cut: bool) -> None:
    needs(kind)
    found = run_mpi(ranks, operations, True, cut, kind=kind, timeout=300)
    assert broken(OPERATIONS, found) == {}
    assert found[0]["cases"] > 1000


@pytest.mark.parametrize(
    ("kind", "thread_level", "options"),
    [("open_mpi", 1, ("funneled", "verify", True)), ("mpich", 3, ("multiple", "watch"))],
)
def test_it_behaves_as_torch_promises(kind: str, thread_level: int, options: tuple[Any, ...], tmp_path: Path) -> None:
    needs(kind)
    found = run_mpi(2, behaviour, tmp_path, *options, kind=kind, timeout=300)
    assert broken(PROMISES, found) == {}
    assert found[0]["thread level"] == thread_level
    assert [(tmp_path / f"callback-{rank}").read_text() for rank in (0, 1)] == ["2.0", "2.0"]
