"""The search, with a wall made of numbers."""

from __future__ import annotations

import pytest

from lightning_lockstep.batch_size.search import SizeSearch, Trial


def run(search: SizeSearch, wall: int) -> tuple[int, int]:
    while not (proposal := search.propose()).stop:
        assert proposal.size not in [trial.size for trial in search.trials], "a size was tried twice"
        search.record(Trial(proposal.size, proposal.size <= wall))
    if proposal.size:
        assert Trial(proposal.size, True) in search.trials, "a size that was not run"
    return proposal.size, len(search.trials)


@pytest.mark.parametrize("wall", [1, 2, 3, 7, 30, 100, 511, 512, 600, 1023, 5000])
def test_a_search_ends_near_the_wall_within_its_trials(wall):
    size, trials = run(SizeSearch(max_trials=12), wall)
    assert 0.98 * wall <= size <= wall and trials <= 12


def test_nothing_fits_a_start_too_high_and_a_cap():
    search = SizeSearch(64)
    assert run(search, 0)[0] == 0 and search.propose().reason == "1 does not fit"
    assert 980 <= run(SizeSearch(4096), 1000)[0] <= 1000
    assert run(SizeSearch(max_val=500), 10**6)[0] == 500
    assert run(SizeSearch(900, max_val=500), 10**6)[0] == 500
    assert run(SizeSearch(max_trials=3), 10**6) == (128, 3)


def test_memory_that_comes_and_goes_takes_the_last_word():
    search = SizeSearch()
    search.record(Trial(512, True))
    search.record(Trial(256, False))
    assert search.low == 0 and search.high == 256
