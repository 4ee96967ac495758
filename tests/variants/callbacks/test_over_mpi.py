"""Callbacks under mpirun, where ranks talk over mpi4py: one job runs the fits of all of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.harness import MODELS, run_script
from tests.models.distributed.mpi.launch import mpi_command, mpi_environ
from tests.ranks.overflow.test_communicating_step import check_contrastive

pytestmark = pytest.mark.mpi

PROGRAM = MODELS / "callbacks" / "program_mpi.py"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mpi")
    command = [*mpi_command("open_mpi", 2), str(PROGRAM), str(folder)]
    outcome = run_script(command, env=mpi_environ(), cwd=folder, timeout=240)
    assert outcome.returncode == 0, outcome.output
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [each["backend"] for each in found] == ["mpi4py", "mpi4py"]
    return found


def test_the_batch_size(both: list[dict[str, Any]]) -> None:
    zero, one = (each["batch size"] for each in both)
    assert zero == one or abs(zero["apart"] - one["apart"]) < 1e-5
    for each in (zero, one):
        assert all(294 <= each[f"search {where}"] <= 300 for where in ("forward", "backward", "optimizer"))
        assert each["split"] >= 2 and each["apart"] < 1e-5


def test_the_overflow(both: list[dict[str, Any]]) -> None:
    check_contrastive(*(each["overflow"] for each in both))


def test_the_replicas(both: list[dict[str, Any]]) -> None:
    found = both[0]["replicas"]
    assert found["healthy"] == {"error": None, "lines": [], "steps": 12}
    assert "An optimizer has stepped on some ranks only" in found["skipped"]["error"]
    assert found["device"]["error"].startswith("rank 0, rank 1 compute different values")


def test_the_straggler(both: list[dict[str, Any]]) -> None:
    found = both[0]["stragglers"]
    verdict = found["verdict"]
    assert (verdict["rank"], verdict["where"]) == (1, "data loading"), found["text"]
