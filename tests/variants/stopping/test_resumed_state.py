"""The other cases of ``tests/ranks/stopping/test_resumed_state.py``: more loops, strategies and stages."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_ranks
from tests.models.stopping.resumed_states import table

CASES = [
    "validates across epochs",
    "max_steps",
    "no validation",
    "two optimizers",
    "DeepSpeed, stage 3",
    "DeepSpeed, accumulated",
]


def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path: Path) -> None:
    for wrong in run_ranks(2, table, str(tmp_path), CASES, backend=None, timeout=400):
        assert wrong == {}
