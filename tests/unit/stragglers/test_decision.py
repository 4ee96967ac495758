"""The decision, on plain numbers: no trainer, no ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from lightning_lockstep.stragglers import (
    NOBODY,
    RankTimes,
    StragglerTracker,
    Sums,
    Times,
    Verdict,
    Window,
    change_line,
    decide,
    figures,
    report,
)

STEP = 0.1
Step = tuple[int, Times]


def step(number: int, cost: dict[int, float], *, ranks: int = 2, part: int = 1) -> Step:
    """A step in which the others waited ``cost`` seconds for a rank, which was longer in a part."""
    times = {}
    for rank in range(ranks):
        own = [0.01, STEP, 0.001]
        own[part] += cost.get(rank, 0.0)
        # The reduction itself takes all of them as long.
        times[rank] = RankTimes(*own, sum(cost.values()) - cost.get(rank, 0.0) + 0.02)
    return number, times


def steps(count: int, cost: Callable[[int], dict[int, float]], **options: int) -> list[Step]:
    return [step(i, cost(i), **options) for i in range(count)]


def decided(given: Sequence[Step], *, ranks: int = 2, before: Verdict = NOBODY) -> Verdict:
    sums = Sums(ranks)
    for one in given:
        sums.add(one[1])
    return decide(sums, min_share=0.05, before=before)


def test_the_rank_that_waits_least_in_every_step_is_slow() -> None:
    verdict = decided(steps(50, lambda i: {1: 0.04}, part=0))
    assert (verdict.rank, verdict.where) == (1, "data loading")
    assert verdict.lost == pytest.approx(0.04) and verdict.share == pytest.approx(0.04 / verdict.step_seconds)
    assert (verdict.slow_steps, verdict.steps) == (50, 50)


def test_a_rank_that_is_late_in_every_tenth_step_is_slow_at_times() -> None:
    # Beside the large ones, small ones in every step, which must not count.
    verdict = decided(steps(50, lambda i: {1: 0.3 if i % 10 == 0 else 0.001}, part=2))
    assert (verdict.rank, verdict.where) == (1, "callbacks")
    assert verdict.slow_steps == 5


@pytest.mark.parametrize(
    "cost",
    [
        pytest.param(lambda i: {}, id="nobody is late"),
        pytest.param(lambda i: {1: 0.004}, id="less than 5 % is lost"),
        pytest.param(lambda i: {i % 2: 0.04}, id="late in turn"),
        pytest.param(lambda i: {1: 2.0} if i == 20 else {}, id="one hiccup"),
        pytest.param(lambda i: {1: 1.0} if i in (20, 40) else {}, id="two hiccups"),
    ],
)
def test_nobody_is_named(cost: Callable[[int], dict[int, float]]) -> None:
    assert decided(steps(50, cost)) == NOBODY


def test_chance_names_nobody() -> None:
    """Ranks that are late by chance, large share or not: in few of many runs is one named."""
    chance = random.Random(1)

    def late(i: int) -> dict[int, float]:
        return {chance.randrange(4): chance.expovariate(1 / 0.05)}

    named = [decided(steps(50, late, ranks=4), ranks=4).rank is not None for _ in range(100)]
    assert sum(named) <= 10


def test_a_value_near_the_limit_does_not_change_the_verdict() -> None:
    named = decided(steps(50, lambda i: {1: 0.04}))
    near = steps(50, lambda i: {1: 0.005})
    assert decided(near) == NOBODY
    assert decided(near, before=named).rank == 1
    assert decided(steps(50, lambda i: {1: 0.002}), before=named) == NOBODY


# -- the run --------------------------------------------------------------------------------------------


def track(given: Sequence[Step], every: int = 25, ranks: int = 2) -> tuple[StragglerTracker, list[Window]]:
    tracker = StragglerTracker(ranks, every_n_steps=every, min_share=0.05)
    windows = [window for one in given if (window := tracker.add(*one)) is not None]
    last = tracker.decide_now()
    return tracker, windows + ([last] if last else [])


def test_a_line_when_it_changes_and_only_then() -> None:
    given = steps(400, lambda i: {1: 0.05} if 100 <= i < 250 else {})
    tracker, windows = track(given)
    changed = [window for window in windows if window.changed]
    assert [window.since for window in changed] == [100, 275]  # a verdict stands on 50 steps
    hosts = {0: "node0", 1: "node7"}
    assert change_line(changed[0], hosts).startswith("StragglerMonitor: since step 100: rank 1 (host node7) is ")
    assert change_line(changed[1], hosts) == (
        "StragglerMonitor: since step 275 the others no longer wait for rank 1 (host node7)."
    )
    assert tracker.verdict == NOBODY and tracker.total.steps == 400


def test_few_steps_name_nobody_until_the_run_is_over() -> None:
    tracker = StragglerTracker(2, every_n_steps=4, min_share=0.05)
    windows = [tracker.add(*one) for one in steps(12, lambda i: {1: 0.05})]
    assert windows == [None] * 12
    assert tracker.conclusion().rank == 1
    _, windows = track(steps(24, lambda i: {1: 0.05}), every=4)
    (changed,) = [window for window in windows if window is not None and window.changed]
    assert changed.since == 0


def test_the_report_is_a_table_in_rank_order_and_a_sentence() -> None:
    tracker, _ = track(steps(100, lambda i: {2: 0.05}, ranks=3, part=0), ranks=3)
    text = report(tracker, {0: "a", 1: "b", 2: "c"})
    rows = [line.split() for line in text.splitlines()[2:5]]
    assert [row[:2] for row in rows] == [["0", "a"], ["1", "b"], ["2", "c"]]
    assert rows[0][2:] == ["10.0", "100.0", "1.0", "70.0", "0", "0%"]
    assert rows[2][2:] == ["60.0", "100.0", "1.0", "20.0", "100", "100%"]
    assert text.splitlines()[5] == (
        "StragglerMonitor: rank 2 (host c) is slow in about 100 of 100 steps: the others wait 50 ms of each 181 ms step"
        " for it (28%), in data loading."
    )


def test_no_rank_stands_out() -> None:
    tracker, _ = track(steps(100, lambda i: {i % 2: 0.1}))
    assert report(tracker, {}, [1]).splitlines()[-2:] == [
        "StragglerMonitor: no step times came from rank 1, which are left out.",
        "StragglerMonitor: no rank stands out; the ranks waited for each other in 43% of the time.",
    ]


def test_a_run_of_which_nothing_was_measured_says_so() -> None:
    tracker, windows = track([])
    assert not windows and "could not be compared" in report(tracker, {})


def test_the_figures_for_the_loggers() -> None:
    _, (window, *_) = track(steps(50, lambda i: {1: 0.1}))
    assert figures(window) == pytest.approx(
        {
            "straggler/rank": 1.0,
            "straggler/lost_share": 0.1 / 0.231,
            "straggler/lost_seconds": 0.1,
            "straggler/step_seconds": 0.231,
        }
    )
