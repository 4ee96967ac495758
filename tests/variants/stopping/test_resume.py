"""Each loader and each stop on one, two and four ranks: a resumed epoch goes on with the next batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common.stopping.resumes import (
    LOADERS,
    Change,
    check_numbers,
    resume_all,
    save_all,
    table,
    ways_to_stop,
)
from tests.helpers import run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_loader_goes_on_with_the_next_batch(tmp_path: Path, ranks: int) -> None:
    # With workers it is the same on fewer ranks, and these would be many processes on two cores.
    names = [name for name in LOADERS if ranks < 4 or "workers" not in name]
    for found in run_ranks(ranks, table, str(tmp_path), names, backend=None, timeout=400):
        assert {name: row for name, row in found.items() if row != "exact"} == {}


@pytest.mark.parametrize("ranks", [2])
def test_every_way_to_stop(tmp_path: Path, ranks: int) -> None:
    names = ["shuffled", "persistent workers", "stream", "stateful data"]
    for found in run_ranks(ranks, ways_to_stop, str(tmp_path), names, backend=None, timeout=400):
        assert {name: row for name, row in found.items() if row != "exact"} == {}


#: Ranks before and after.
MORE: dict[tuple[int, int], dict[str, Change]] = {
    (2, 4): {"shuffled": ("shuffled", {}, None)},
    (4, 2): {"workers": ("workers", {}, None)},
    (1, 4): {"shuffled": ("shuffled", {}, None)},
}


@pytest.mark.parametrize(("before", "after"), MORE)
def test_four_ranks_before_or_after(tmp_path: Path, before: int, after: int) -> None:
    cases = MORE[before, after]
    saved = run_ranks(before, save_all, str(tmp_path), cases, backend=None, timeout=120)
    check_numbers(cases, saved, run_ranks(after, resume_all, str(tmp_path), cases, backend=None, timeout=120))
