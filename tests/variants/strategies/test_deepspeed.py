"""Fits under DeepSpeed: checkpoints of the other stages."""

from __future__ import annotations

from pathlib import Path

from tests.programs.strategies.test_deepspeed import check_checkpoints


def test_checkpoints_of_stages_0_and_1(tmp_path: Path) -> None:
    check_checkpoints(tmp_path, 0, 1)
