"""OverflowDetector under real DeepSpeed on two CPU ranks: a step goes bad on one, and all act alike.

All stages with all cases are in ``tests/variants``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common.deepspeed.overflow import check, fits
from tests.helpers import run_ranks


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        (2, ["explode", "backward", "part", "accumulate", "skip", "ddp", "warn", "plain metric"]),
        (3, ["explode", "backward", "without", "clean", "three steps"]),
    ],
)
def test_all_ranks_act_alike(stage: int, names: list[str], tmp_path: Path) -> None:
    check(stage, *run_ranks(2, fits, stage, str(tmp_path), names, timeout=120))
