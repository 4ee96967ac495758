"""AutoBatchSize under DeepSpeed: the other stages and options."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_ranks
from tests.models.deepspeed.batch_size import RUNS, check_runs, with_and_without


def test_a_run_after_a_search_is_bit_identical_to_one_with_that_size(tmp_path: Path) -> None:
    for found in run_ranks(2, with_and_without, str(tmp_path), RUNS, backend=None, timeout=170):
        check_runs(found)
