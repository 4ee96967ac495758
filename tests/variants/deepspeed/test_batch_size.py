"""AutoBatchSize under DeepSpeed: the other stages, options and limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common.batch_size.models import largest
from tests.common.deepspeed.batch_size import (
    RUNS,
    STAGES,
    Walled,
    check_limits,
    check_runs,
    other_loops,
    real_limits,
    trainer,
    with_and_without,
)
from tests.helpers import run_ranks, run_ranks_raw


def test_a_run_after_a_search_is_bit_identical_to_one_with_that_size(tmp_path: Path) -> None:
    for found in run_ranks(2, with_and_without, str(tmp_path), RUNS, backend=None, timeout=170):
        check_runs(found)


def test_evaluation_and_a_global_batch_to_keep(tmp_path: Path) -> None:
    for found in run_ranks(2, other_loops, str(tmp_path), STAGES, (1, 3), backend=None, timeout=120):
        assert found[:4] == [[10, 10]] * 4
        assert found[4:6] == [(8, 4, 8, 4, 4, 4)] * 2


@pytest.mark.parametrize("stages", [(0, 1), (3, 2)])
def test_a_real_limit_is_found_and_kept_to_by_the_steps_that_follow(
    tmp_path: Path, stages: tuple[int, ...]
) -> None:
    check_limits(run_ranks(2, real_limits, str(tmp_path), stages, backend=None, timeout=170))


def breaks(folder: str) -> None:
    trainer(2, largest(), default_root_dir=folder).fit(Walled("forward", text="a bug of the step"))


def test_another_error_on_one_rank_ends_all(tmp_path: Path) -> None:
    outcomes = run_ranks_raw(2, breaks, str(tmp_path), backend=None, timeout=60)
    assert not any(outcome.ok or outcome.killed_by_helper for outcome in outcomes)
    assert any("a bug of the step" in (outcome.traceback or "") + outcome.stderr for outcome in outcomes)
