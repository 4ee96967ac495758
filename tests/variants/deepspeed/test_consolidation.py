"""Checkpoints of each stage, precision and optimizer of DeepSpeed, of two and three ranks, in one file each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness import MODELS, run_ranks, run_script
from tests.models.deepspeed.program_checkpoints import CONFIGS, check_consolidated, write_checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:.*left out what is not plain data:RuntimeWarning")


def names(ranks: int) -> list[str]:
    """The checkpoints that a number of ranks writes: all that this machine can, and of three the odd ones."""
    import torch

    left_out = () if torch.ops.mkldnn._is_mkldnn_fp16_supported() and ranks == 2 else ("fp16",)
    left_out += () if ranks == 2 else ("no_frozen", "no_frozen_2", "zero_init")
    return [name for name in CONFIGS if not name.endswith(left_out)]


CASES = [pytest.param(ranks, name, id=f"{name}_of_{ranks}") for ranks in (2, 3) for name in names(ranks)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {}
    for ranks in (2, 3):
        folder = folders[ranks] = tmp_path_factory.mktemp(f"of_{ranks}")
        env = {"DS_ACCELERATOR": "cpu"}
        run_ranks(ranks, write_checkpoints, str(folder), names(ranks), timeout=120, env=env)
    return folders


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_weights_are_those_of_the_optimizer_or_as_saved(
    ranks: int, name: str, written: dict[int, Path], tmp_path: Path
) -> None:
    check_consolidated(written[ranks] / f"{name}.ckpt", tmp_path / "whole.ckpt")


def test_model_loads_all_where_deepspeed_cannot_be_imported(written: dict[int, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(written[2], tmp_path / "all")
    outcome = run_script([MODELS / "deepspeed" / "program_checkpoints.py", folder], timeout=300)
    assert outcome.returncode == 0, outcome.output
    lines = [line for line in outcome.stdout.splitlines() if "wrong:" in line]
    assert sorted(lines) == sorted(f"{name} wrong: [] tied: True width: 5" for name in names(2))
