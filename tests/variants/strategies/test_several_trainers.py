"""Several Trainers in one script, with each way of starting ranks and other strategies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.models.strategies.trainers import (
    OTHER_RANKS,
    PYTHON,
    TOO_LATE,
    check_trainers,
    check_uncaught,
)

# On ranks that exist: `{}` is the strategy of the launcher.
ON_RANKS = {
    "fit:{}:2": 2,
    "test:{}:1": OTHER_RANKS,
    "validate:{}:2": 2,
    "predict:{}:2": 2,
    "fit:{}:3": OTHER_RANKS,
    "fit:{}:1x2": OTHER_RANKS,
    "test:{}:3": OTHER_RANKS,
    "test:{}:2": 2,
    "validate:lockstep_ddp_spawn:1": OTHER_RANKS,
    "fit:lockstep_ddp_spawn!:2": 2,
}
OTHER_STRATEGIES = {
    "fit:ddp!:2": 2,  # Lightning starts a process in addition, which ends by itself
    "fit:lockstep_fsdp!:2": 2,
    "fit:lockstep_deepspeed_stage_2!:2": 2,
    "test:lockstep_ddp:2": 2,
}
# Ranks that are no longer there after a call: any order, until the script is to be run again.
SPAWNED = {
    "fit:lockstep_ddp_spawn:1": 1,
    "fit:lockstep_ddp_spawn:2": 2,
    "test:lockstep_ddp_spawn:1": 1,
    "validate:lockstep_ddp_fork:2": 2,
    "fit:lockstep_ddp:2": TOO_LATE,
    "test:lockstep_ddp!:1": 1,
    "fit:lockstep_ddp_spawn!:2": 2,
}
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node=2"]


@pytest.mark.parametrize(
    ("command", "table", "strategy", "ranks"),
    [
        pytest.param(PYTHON, ON_RANKS | OTHER_STRATEGIES, "lockstep_ddp", 2, id="the script again"),
        pytest.param(PYTHON, SPAWNED, "lockstep_ddp", 1, id="multiprocessing"),
        pytest.param(TORCHRUN, ON_RANKS, "lockstep_ddp", 2, id="torchrun"),
        pytest.param(PYTHON, ON_RANKS, "lockstep_mpi", 2, id="mpirun", marks=pytest.mark.mpi),
    ],
)
def test_each_trainer_is_right_or_one_error_of_all_ranks(
    command: list[str], table: dict[str, int | str], strategy: str, ranks: int, tmp_path: Path
) -> None:
    check_trainers(command, table, strategy, ranks, tmp_path)


def test_nobody_catches_it(tmp_path: Path) -> None:
    check_uncaught(["fit:lockstep_ddp:2", "fit:lockstep_ddp:3"], OTHER_RANKS, tmp_path)
