"""Several Trainers in one script: each is right, or is one error on every rank before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.models.strategies.trainers import (
    OTHER_RANKS,
    PYTHON,
    TOO_LATE,
    check_trainers,
    check_uncaught,
)

AGAIN: dict[str, int | str] = {
    "fit:lockstep_ddp:2": 2,
    "test:lockstep_ddp:1": OTHER_RANKS,
    "predict:lockstep_ddp:2": 2,
    "fit:lockstep_ddp:1": OTHER_RANKS,
    "fit:lockstep_ddp:3": OTHER_RANKS,
    "fit:lockstep_ddp:1x2": OTHER_RANKS,  # as many ranks: rank 0 alone cannot see that from their number
    "fit:lockstep_ddp:2x2": OTHER_RANKS,
    "validate:lockstep_ddp:2": 2,
    "fit:lockstep_fsdp!:2": 2,
}
# Ranks that are no longer there after a call: any number, until the script is to be run again.
SPAWNED: dict[str, int | str] = {
    "fit:lockstep_ddp_spawn:2": 2,
    "test:lockstep_ddp_spawn:1": 1,
    "fit:lockstep_ddp:2": TOO_LATE,
}


def test_each_trainer_is_right_or_one_error_of_all_ranks(tmp_path: Path) -> None:
    outcome = check_trainers(PYTHON, AGAIN, "lockstep_ddp", 2, tmp_path)
    assert len(re.findall(r"^2 ranks *$", outcome.stderr, re.MULTILINE)) == 1, "the placement is shown once"


def test_each_trainer_has_ranks_of_its_own_with_multiprocessing(tmp_path: Path) -> None:
    check_trainers(PYTHON, SPAWNED, "lockstep_ddp", 1, tmp_path)


def test_nobody_catches_it(tmp_path: Path) -> None:
    check_uncaught(["fit:lockstep_ddp:1", "fit:lockstep_ddp:2"], TOO_LATE, tmp_path)
