"""The searches, with a wall made of numbers."""

from __future__ import annotations

import pytest

from lightning_lockstep.batch_size.search import SizeSearch, Trial

BASE, SLOPE = 1e9, 3.7e6


def run(search: SizeSearch, wall: int, *, read: bool = False) -> tuple[int, int]:
    while not (proposal := search.propose()).stop:
        assert proposal.size not in [trial.size for trial in search.trials], "a size was tried twice"
        fits = proposal.size <= wall
        peak = BASE + SLOPE * proposal.size if read and fits else None
        limit = BASE + SLOPE * (wall + 0.5) if read else None
        search.record(Trial(proposal.size, fits, peak, limit))
    if proposal.size:
        assert any(trial.size == proposal.size and trial.fits for trial in search.trials), (
            "a size that was not run"
        )
    return proposal.size, len(search.trials)


@pytest.mark.parametrize("wall", [1, 2, 3, 7, 30, 100, 511, 512, 600, 1023, 5000])
def test_every_search_ends_near_the_wall_within_its_trials(wall):
    size, trials = run(SizeSearch("binsearch", max_trials=12), wall)
    assert 0.98 * wall <= size <= wall and trials <= 12
    size, trials = run(SizeSearch("model", noise=8e6), wall, read=True)
    assert 0.98 * wall <= size <= wall and trials <= 6
    size, trials = run(SizeSearch("power"), wall)
    assert wall / 2 < size <= wall


@pytest.mark.parametrize("mode", ["power", "binsearch", "model"])
def test_nothing_fits_a_start_too_high_and_a_cap(mode):
    def make(**kw):
        return SizeSearch(mode, **{"noise": 8e6, **kw})

    search = make(init_val=64)
    assert run(search, 0)[0] == 0 and search.propose().reason == "1 does not fit"
    assert 500 <= run(make(init_val=4096), 1000, read=True)[0] <= 1000
    assert run(make(max_val=500), 10**6, read=True)[0] == 500
    assert run(make(init_val=900, max_val=500), 10**6)[0] == 500


def test_memory_that_comes_and_goes_takes_the_last_word():
    search = SizeSearch("binsearch")
    search.record(Trial(512, True))
    search.record(Trial(256, False))
    assert search.low == 0 and search.high == 256


def test_power_stops_at_max_trials():
    assert run(SizeSearch("power", max_trials=3), 10**6) == (8, 3)
