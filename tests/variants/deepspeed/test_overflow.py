"""OverflowDetector in each stage of ZeRO, each way in which a step goes bad."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_lockstep import LockstepDeepSpeedStrategy, OverflowDetector
from tests.common.deepspeed.overflow import CASES, Net, check, fits
from tests.common.overflow.models import MARK, Explode, data, fit
from tests.helpers import run_ranks, run_ranks_raw


@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_act_alike(stage: int, tmp_path: Path) -> None:
    check(stage, *run_ranks(2, fits, stage, str(tmp_path), list(CASES), timeout=200))


class Leaves(Net):
    """Fails when its batch is replayed on rank 1."""

    def __init__(self) -> None:
        super().__init__(Explode())
        self.seen = 0
        self.replays = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.replays and self.global_rank == 1:
            raise ValueError("not twice on this rank")
        self.replays = bool((batch > MARK / 2).any()) or batch_idx == 2
        return super().training_step(batch, batch_idx)


def leaves(folder: str) -> str:
    rank = int(os.environ["RANK"])
    loader = data(batches=4, marked={2: 1} if rank == 1 else {}, seed=rank)
    strategy = LockstepDeepSpeedStrategy(stage=3)
    fit(
        Leaves(), loader, OverflowDetector(timeout=5.0), devices=2, strategy=strategy, default_root_dir=folder
    )
    return "no error"


def test_a_rank_that_leaves_a_common_replay_ends_the_run(tmp_path: Any) -> None:
    outcomes = run_ranks_raw(2, leaves, str(tmp_path), timeout=120)
    assert not any(outcome.ok or outcome.killed_by_helper for outcome in outcomes)
    assert "not twice on this rank" in str(outcomes[1].exception)
