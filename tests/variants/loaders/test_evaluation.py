"""Evaluations on more ranks, under more strategies, against Lightning on one device."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from lightning_lockstep import LockstepDDPStrategy
from tests.common.distributed.mpi.launch import mpi_command, mpi_environ
from tests.common.loaders.same_numbers import difference, fitted
from tests.helpers import COMMON, run_ranks, run_script
from tests.ranks.loaders.test_evaluation import check, found


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("ddp", 4), ("fsdp", 3), ("deepspeed 3", 3)],
)
def test_a_strategy(strategy: str, ranks: int) -> None:
    check(found(strategy, ranks))


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [3])
def test_mpi(tmp_path: Path, ranks: int) -> None:
    program = COMMON / "loaders" / "program_mpi.py"
    command = [*mpi_command("open_mpi", ranks), str(program), str(tmp_path), str(ranks)]
    outcome = run_script(command, env=mpi_environ(), cwd=tmp_path, timeout=240)
    assert outcome.returncode == 0, outcome.output
    of_ranks = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]
    ((steps, weights),) = run_ranks(1, a_stream, backend=None)
    for of_rank in of_ranks:
        found_steps, found_weights = of_rank.pop("stream")
        assert found_steps == steps and difference(found_weights, weights) < 1e-12
    check(of_ranks)


def a_stream() -> Any:
    return fitted(LockstepDDPStrategy(iterable_datasets="shard"), 97, 1, stream=True)
