"""Each stage, precision and optimizer, from two ranks to three, and to other stages."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_ranks
from tests.models.deepspeed.other_ranks import CASES, CROSSED, check, resume, write


def test_a_fit_goes_on_with_all_that_it_had(tmp_path: Path) -> None:
    run_ranks(2, write, str(tmp_path), list(CASES), timeout=200)
    for found in run_ranks(3, resume, 3, str(tmp_path), list(CASES), CROSSED, timeout=200):
        check(found, tmp_path)
