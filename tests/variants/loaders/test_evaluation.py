"""Evaluations on more ranks, under more strategies, against Lightning on one device."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.harness import MODELS, run_script
from tests.models.distributed.mpi.launch import mpi_command, mpi_environ
from tests.ranks.loaders.test_evaluation import check, found


def test_deepspeed() -> None:
    check(found("deepspeed 3", 3))


@pytest.mark.mpi
def test_mpi(tmp_path: Path) -> None:
    program = MODELS / "loaders" / "program_mpi.py"
    command = [*mpi_command("open_mpi", 3), str(program), str(tmp_path), "3"]
    outcome = run_script(command, env=mpi_environ(), cwd=tmp_path, timeout=240)
    assert outcome.returncode == 0, outcome.output
    of_ranks = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(3)]
    check(of_ranks)
