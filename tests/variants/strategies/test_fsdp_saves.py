"""Saves of LockstepFSDPStrategy that are killed at other moments than in ``tests/ranks``: the last one stays whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed.checkpoints.command import main as consolidate
from lightning_lockstep.distributed import checkpoint_folder
from tests.harness import kill_self, run_ranks, run_ranks_raw
from tests.models.strategies.fsdp_models import Net, difference, fit, fsdp, weights


def killed(folder: Path, moment: str) -> None:
    """Rank 1 ends while it writes its parts, or rank 0 when the new folder has taken the name."""
    trainer = fit(Net, 2, fsdp(state_dict="sharded"))
    trainer.save_checkpoint(folder / "last.ckpt")
    if moment == "writing" and trainer.global_rank == 1:
        torch.distributed.checkpoint.save = lambda *args, **kwargs: kill_self()
    if moment == "replaced" and trainer.is_global_zero:
        checkpoint_folder._remove = lambda path: kill_self() if path.exists() else None
    trainer.save_checkpoint(folder / "last.ckpt")


def alone() -> Any:
    return weights(fit(Net, 1))


@pytest.mark.parametrize("moment", ["writing", "replaced"])
def test_a_save_that_is_killed_leaves_the_last_one_whole(
    moment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (straight,) = run_ranks(1, alone, backend=None)
    outcomes = run_ranks_raw(2, killed, tmp_path, moment, backend=None, timeout=60)
    assert not any(outcome.ok for outcome in outcomes)
    assert "last.ckpt" in os.listdir(tmp_path)
    plain = tmp_path / "plain.ckpt"
    assert consolidate([str(tmp_path / "last.ckpt"), "--output", str(plain)]) == 0
    assert "last.ckpt.before" not in capsys.readouterr().err
    assert difference(straight, torch.load(plain, weights_only=True)["state_dict"]) < 1e-5
