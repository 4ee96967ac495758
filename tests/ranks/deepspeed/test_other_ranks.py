"""A fit goes on from the checkpoint of two ranks on one, as if it had always run there.

More stages and optimizers, and three ranks, are in ``tests/variants``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep import ConfigurationError
from lightning_lockstep.deepspeed.checkpoints.files import Checkpoint
from lightning_lockstep.deepspeed.checkpoints.redivision import SavedOptimizer
from tests.harness import run_ranks
from tests.models.deepspeed.other_ranks import Thing, check, evaluated, objects_found, resume, write

WRITTEN = ["stage 1", "stage 2", "stage 3"]


def on_one(folder: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], tuple[str, str]]:
    resumed = resume(1, folder, ["stage 1", "stage 3"], {"stage 1": "stage 3"})
    tested = evaluated(1, "stage 3", f"{folder}/stage 3.ckpt")
    return resumed, tested, objects_found(f"{folder}/object.ckpt")


def test_a_fit_goes_on_with_all_that_it_had_or_says_why_it_cannot(tmp_path: Path) -> None:
    run_ranks(2, write, str(tmp_path), WRITTEN, timeout=120)
    file = tmp_path / "object.ckpt" / "checkpoint" / "mp_rank_00_model_states.pt"
    shutil.copytree(tmp_path / "stage 2.ckpt", tmp_path / "object.ckpt")
    torch.save({**torch.load(file, weights_only=False), "thing": Thing()}, file)
    ((resumed, tested, objects),) = run_ranks(1, on_one, str(tmp_path), timeout=120)
    check(resumed, tmp_path)
    truth = torch.load(tmp_path / "stage 3.truth", weights_only=False)
    assert len(tested) == 4 and all(torch.equal(value, truth[name]) for name, value in tested.items())
    assert "holds objects of classes: thing. Expected plain data" in objects[0] and objects[1] == "Thing"


def test_a_checkpoint_without_a_state_of_the_optimizer(tmp_path: Path) -> None:
    """That of an evaluation has none, in whatever stage."""
    with pytest.raises(ConfigurationError, match="holds no optimizer state that is divided"):
        SavedOptimizer(Checkpoint(tmp_path, [{"module": {}}], []))
