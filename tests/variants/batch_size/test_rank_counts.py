"""AutoBatchSize on one rank and on four: the tests of two ranks, in tests/ranks, on what these have found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_ranks
from tests.ranks.batch_size import test_global_batch, test_search, test_split
from tests.ranks.batch_size.test_global_batch import (  # noqa: F401
    test_a_global_batch_of_the_data_or_of_effective_batch_size_is_kept,
    test_global_batches_stay_within_the_data,
    test_steps_and_weights_are_those_without_a_search,
    test_what_is_configured_is_there_again_after_each_fit_or_evaluation,
)

# Found here too: their fixture is the one below.
from tests.ranks.batch_size.test_search import (  # noqa: F401
    test_a_search_that_finds_nothing_is_the_same_error_on_all_ranks,
    test_a_subclass_searches_again_at_epochs_of_its_own,
    test_all_ranks_find_the_same_size_whoever_runs_out,
    test_attributes_follow_the_search_and_come_back_after_a_failure,
    test_lightnings_search_of_a_learning_rate_is_no_failure,
    test_the_decorator_tries_the_same_sizes_on_every_rank,
)
from tests.ranks.batch_size.test_split import (  # noqa: F401
    test_every_argument_of_log_is_kept,
    test_hooks_act_on_the_gradient_of_the_whole_batch_once,
    test_the_result_is_that_of_the_whole_batch,
)


def cases(folder: str) -> dict[str, Any]:
    """All fits of the three files, on one rank."""
    return {
        name: value
        for file in (test_search, test_global_batch, test_split)
        for name, value in file.cases(1, folder).items()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(1, cases, str(tmp_path_factory.mktemp("found")), backend=None, timeout=300)


def test_four_ranks_find_the_same_size(tmp_path: Path) -> None:
    found = run_ranks(4, test_search.runs_out, 4, str(tmp_path), backend=None, timeout=170)
    for where in ("forward", "backward", "optimizer", "collate"):
        test_search.test_all_ranks_find_the_same_size_whoever_runs_out(found, where)
    test_search.test_a_search_that_finds_nothing_is_the_same_error_on_all_ranks(found)
