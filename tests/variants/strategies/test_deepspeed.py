"""Fits under DeepSpeed: checkpoints of the other stages, and how a job ends if a rank fails."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.common.strategies.failures import run
from tests.programs.strategies.test_deepspeed import check_checkpoints


def test_checkpoints_of_stages_0_and_1(tmp_path: Path) -> None:
    check_checkpoints(tmp_path, 0, 1)


def test_a_raising_rank_ends_the_job_with_its_traceback_last() -> None:
    outcome = run("raise@1", "deepspeed")
    assert outcome.returncode == 1
    assert re.search(r"ValueError: boom in training_step\nSaved to .*$", outcome.stderr.rstrip()), (
        outcome.stderr
    )
    assert "failed at epoch 0, step 5, batch 5, stage train, in training_step: ValueError" in outcome.stderr


def test_a_killed_rank_ends_the_job_and_is_named_last() -> None:
    outcome = run("kill@1", "deepspeed")
    assert outcome.returncode == 128 + signal.SIGKILL
    assert re.search(r"rank 1 of 2 .* was killed by SIGKILL", outcome.stderr[-800:]), outcome.stderr
