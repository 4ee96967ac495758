"""Several Trainers in one script, with each way of starting ranks and other strategies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.common.strategies.trainers import (
    DIVIDED,
    FIT_ALONE,
    LIMIT,
    OTHER_RANKS,
    PYTHON,
    TOO_LATE,
    check_trainers,
    check_uncaught,
)
from tests.helpers import run_script

# On ranks that exist: `{}` is the strategy of the launcher.
ON_RANKS = {
    "fit:{}:2": 2,
    "test:{}:1": 1,
    "validate:{}:1": 1,
    "predict:{}:1": 1,
    "fit:{}:1": FIT_ALONE,
    "0/test:{}:1": 1,
    "fit:{}:3": OTHER_RANKS,
    "test:{}:3": OTHER_RANKS,
    "test:{}:2": 2,
    "validate:lockstep_ddp_spawn:1": 1,
    "fit:lockstep_ddp_spawn!:2": 2,
}
OTHER_STRATEGIES = {
    "fit:ddp!:2": 2,  # Lightning starts a process in addition, which ends by itself
    "fit:lockstep_fsdp!:2": 2,
    "test:lockstep_fsdp:1": DIVIDED,
    "test:lockstep_fsdp!:1": 1,
    "fit:lockstep_deepspeed_stage_2!:2": 2,
    "test:lockstep_deepspeed_stage_2:1": OTHER_RANKS,
    "test:lockstep_ddp:1": 1,
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
STOCK_FIRST = {
    "fit:ddp:2": 2,
    "test:lockstep_ddp:1": 1,
    "fit:lockstep_ddp!:2": 2,
    "fit:lockstep_ddp:3": OTHER_RANKS,
}
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node=2"]


@pytest.mark.parametrize(
    ("command", "table", "strategy", "ranks"),
    [
        pytest.param(PYTHON, ON_RANKS | OTHER_STRATEGIES, "lockstep_ddp", 2, id="the script again"),
        pytest.param(PYTHON, STOCK_FIRST, "lockstep_ddp", 2, id="the script again, by Lightning"),
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


LATE = """
import os, time
import lightning as L
import lightning_lockstep
from lightning_lockstep.demo import ConvNet, DigitsData

class Net(ConvNet):
    def test_step(self, batch, batch_idx):
        if os.environ.get("LOCAL_RANK") == "1":
            while not os.path.exists("over"):
                time.sleep(0.05)
            time.sleep(1)
            raise ValueError("late on rank 1")

if __name__ == "__main__":
    data, quiet = DigitsData(batch_size=512), {"accelerator": "cpu", "max_epochs": 1, "logger": False}
    net = Net(width=8)
    L.Trainer(devices=2, strategy="lockstep_ddp", enable_checkpointing=False, **quiet).fit(net, data)
    L.Trainer(devices=1, strategy="lockstep_ddp", enable_checkpointing=False, **quiet).test(net, data)
    open("over", "w").close()
"""


def test_a_rank_that_fails_after_the_program_of_rank_0_has_ended_is_named(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    outcome = run_script([sys.executable, "late.py"], cwd=tmp_path, timeout=LIMIT)
    assert outcome.returncode == 1, outcome.output
    headline, saved = outcome.stderr.rstrip().splitlines()[-2:]
    assert headline.startswith("rank 1 of 2 ") and headline.endswith(
        "in test_step: ValueError: late on rank 1"
    )
    assert saved.startswith("Saved to ") and (tmp_path / "failure.json").exists()
