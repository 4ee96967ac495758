"""A module whose checkpoints have names of their own: each of its weights is saved and loaded, or an error names it.

Other stages, precisions and one rank are in ``tests/variants``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.common.deepspeed.own_names import Case, check, check_consolidated, write_and_resume
from tests.helpers import run_ranks

CASES: list[Case] = [("prefixed", 2, "32-true"), ("hooked", 3, "32-true"), ("adapters", 3, "32-true")]
OPTIONS: dict[str, Any] = {"short": [3], "plain": [2], "crossed": {}}


def test_each_weight_arrives_or_is_named(tmp_path: Path) -> None:
    for found in run_ranks(2, write_and_resume, str(tmp_path), CASES, OPTIONS, timeout=120):
        check(found, tmp_path)
    check_consolidated(tmp_path, CASES)
