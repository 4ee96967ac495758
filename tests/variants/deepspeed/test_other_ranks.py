"""Each stage, precision and optimizer, from two ranks to one and to three, and to other stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common.deepspeed.other_ranks import CASES, CROSSED, check, resume, write
from tests.helpers import run_ranks


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two ranks")
    run_ranks(2, write, str(folder), list(CASES), timeout=200)
    return folder


@pytest.mark.parametrize(("ranks", "crossed"), [(1, {}), (3, CROSSED)])
def test_a_fit_goes_on_with_all_that_it_had(ranks: int, crossed: dict[str, str], written: Path) -> None:
    for found in run_ranks(ranks, resume, ranks, str(written), list(CASES), crossed, timeout=200):
        check(found, written)
