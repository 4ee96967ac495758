"""Evaluations on more ranks, under more strategies, against Lightning on one device."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.common.distributed.mpi.launch import mpi_command, mpi_environ
from tests.helpers import COMMON, run_script
from tests.ranks.loaders.test_evaluation import check, found


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        *(("ddp", ranks) for ranks in (1, 2, 4)),
        *(("fsdp", ranks) for ranks in (3, 4)),
        *((f"deepspeed {stage}", 3) for stage in (1, 3)),
    ],
)
def test_a_strategy(strategy: str, ranks: int) -> None:
    check(found(strategy, ranks))


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_mpi(tmp_path: Path, ranks: int) -> None:
    program = COMMON / "loaders" / "program_mpi.py"
    command = [*mpi_command("open_mpi", ranks), str(program), str(tmp_path), str(ranks)]
    outcome = run_script(command, env=mpi_environ(), cwd=tmp_path, timeout=240)
    assert outcome.returncode == 0, outcome.output
    check([pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(ranks)])
