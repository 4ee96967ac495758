"""Several Trainers in one script: each is right, or is one error on every rank before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.common.distributed.mpi.launch import why_no
from tests.common.strategies.several_trainers import SAMPLES
from tests.helpers import COMMON, ScriptOutcome, run_script

SCRIPT = COMMON / "strategies" / "several_trainers.py"
LIMIT = 300.0  # only so that a hang ends the test

# What each Trainer of a script has to come to, in this order: right on so many ranks, or refused with these words.
OTHER_RANKS = "has connected it as rank"
FIT_ALONE = "devices=1, but an earlier Trainer of this script, or the program"
DIVIDED = "divided among the ranks"
TOO_LATE = "has run on fewer ranks, or on ranks that were started another way"
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
PYTHON = [sys.executable]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node=2"]


def run(command: list[str], *args: str, folder: Path) -> ScriptOutcome:
    outcome = run_script([*command, str(SCRIPT), *args], timeout=LIMIT, cwd=folder)
    assert not outcome.timed_out, outcome.output
    assert outcome.leftovers == (), f"no rank is left behind: {outcome.output}"
    return outcome


@pytest.mark.parametrize(
    ("command", "table", "strategy", "ranks"),
    [
        pytest.param(PYTHON, ON_RANKS | OTHER_STRATEGIES, "lockstep_ddp", 2, id="the script again"),
        pytest.param(PYTHON, STOCK_FIRST, "lockstep_ddp", 2, id="the script again, by Lightning"),
        pytest.param(PYTHON, SPAWNED, "lockstep_ddp", 1, id="multiprocessing"),
        pytest.param(TORCHRUN, ON_RANKS, "lockstep_ddp", 2, id="torchrun"),
        pytest.param(PYTHON, ON_RANKS, "lockstep_mpi", 2, id="mpirun"),
    ],
)
def test_each_trainer_is_right_or_one_error_of_all_ranks(
    command: list[str], table: dict[str, int | str], strategy: str, ranks: int, tmp_path: Path
) -> None:
    if strategy == "lockstep_mpi" and (why := why_no("open_mpi")):
        pytest.skip(why)
    cases = {case.format(strategy): expected for case, expected in table.items()}
    outcome = run(command, "catch", *cases, folder=tmp_path)
    assert outcome.returncode == 0, outcome.output
    for rank in range(ranks):
        lines = (tmp_path / f"rank{rank}").read_text().splitlines()
        said = dict(line.split(" ", 1) for line in lines)
        own = {case: expected for case, expected in cases.items() if rank == 0 or not case.startswith("0/")}
        assert list(said) == list(own), outcome.output
        for case, expected in own.items():
            if isinstance(expected, str):
                assert said[case].startswith("LaunchError") and expected in said[case], said[case]
            else:
                share = expected if case.startswith("predict") else 1
                assert said[case] == str((SAMPLES // share, expected, rank == 0)), (case, said[case])
    assert "\x1b" not in outcome.output, "no bars are drawn where there is no terminal"
    # Only the first rank of a Trainer has written; a refused one has written nothing.
    worked = [case for case, expected in cases.items() if isinstance(expected, int)]
    assert len(list((tmp_path / "runs" / "lightning_logs").iterdir())) == len(worked)


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        (["fit:lockstep_ddp:2", "fit:lockstep_ddp:3"], OTHER_RANKS),
        (["fit:lockstep_ddp:1", "fit:lockstep_ddp:2"], TOO_LATE),
    ],
)
def test_nobody_catches_it(cases: list[str], expected: str, tmp_path: Path) -> None:
    outcome = run(PYTHON, "raise", *cases, folder=tmp_path)
    assert outcome.returncode == 1, outcome.output
    assert outcome.stderr.count(f"errors.LaunchError: devices={cases[1][-1]}") == 1, outcome.output
    assert expected in outcome.stderr
    for trace in ("Traceback", "CollectiveStallError", "Exception ignored"):
        assert trace not in outcome.stderr


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
