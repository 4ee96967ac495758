"""The decision, on plain numbers: no trainer, no ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from lightning_lockstep.stragglers.report import (
    StragglerTracker,
    Window,
    change_line,
    conclusion_line,
    figures,
    report,
)
from lightning_lockstep.stragglers.verdict import (
    NOBODY,
    Clock,
    CollectiveCallTime,
    ComparedStep,
    RankStep,
    RankTimes,
    StepComparer,
    Verdict,
    decide,
    losses_of,
)

STEP = 0.1


def step(number: int, cost: dict[int, float], *, ranks: int = 2, part: int = 1) -> ComparedStep:
    """A step in which the others waited ``cost`` seconds for a rank, which was longer in a part."""
    times = {}
    for rank in range(ranks):
        own = [0.01, STEP, 0.001]
        own[part] += cost.get(rank, 0.0)
        waiting = sum(cost.values()) - cost.get(rank, 0.0)
        times[rank] = RankTimes(*own, waiting)
    return ComparedStep(number, STEP + sum(cost.values()), cost, times, True)


def steps(count: int, cost: Callable[[int], dict[int, float]], **options: int) -> list[ComparedStep]:
    return [step(i, cost(i), **options) for i in range(count)]


def decided(given: Sequence[ComparedStep], *, ranks: int = 2, before: Verdict = NOBODY) -> Verdict:
    return decide(losses_of(given, ranks), min_share=0.05, before=before)


def test_a_rank_that_is_late_in_every_step_is_always_slow() -> None:
    verdict = decided(steps(50, lambda i: {1: 0.04}, part=0))
    assert (verdict.rank, verdict.kind, verdict.where) == (1, "always", "data loading")
    assert verdict.lost == pytest.approx(0.04) and verdict.share == pytest.approx(0.04 / 0.14)
    assert (verdict.slow_steps, verdict.steps) == (50, 50)


def test_a_rank_that_is_late_in_every_tenth_step_is_slow_at_times() -> None:
    # Beside the large ones, small ones in every step, which must not make it "always".
    verdict = decided(steps(50, lambda i: {1: 0.3 if i % 10 == 0 else 0.001}, part=2))
    assert (verdict.rank, verdict.kind, verdict.where) == (1, "at times", "callbacks")
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
    near = steps(50, lambda i: {1: 0.004})  # 3.8 %
    assert decided(near) == NOBODY
    assert decided(near, before=named).rank == 1
    assert decided(steps(50, lambda i: {1: 0.002}), before=named) == NOBODY


# -- the run --------------------------------------------------------------------------------------------


def track(
    given: Sequence[ComparedStep], every: int = 25, ranks: int = 2
) -> tuple[StragglerTracker, list[Window]]:
    tracker = StragglerTracker(ranks, every_n_steps=every, min_share=0.05)
    windows = [window for one in given if (window := tracker.add(one)) is not None]
    last = tracker.finish()
    return tracker, windows + ([last] if last else [])


def test_a_line_when_it_changes_and_only_then() -> None:
    given = steps(400, lambda i: {1: 0.05} if 100 <= i < 250 else {})
    tracker, windows = track(given)
    changed = [window for window in windows if window.changed]
    assert [window.first for window in changed] == [100, 275]  # a verdict stands on 50 steps
    hosts = {0: "node0", 1: "node7"}
    assert change_line(changed[0], hosts).startswith(
        "StragglerMonitor: since step 100: rank 1 (host node7) is "
    )
    assert change_line(changed[1], hosts) == (
        "StragglerMonitor: since step 275 the others no longer wait for rank 1 (host node7)."
    )
    assert tracker.verdict == NOBODY and tracker.total.steps == 400


def test_few_steps_name_nobody_until_the_run_is_over() -> None:
    tracker = StragglerTracker(2, every_n_steps=4, min_share=0.05)
    windows = [tracker.add(one) for one in steps(12, lambda i: {1: 0.05})]
    assert [window.changed for window in windows if window is not None] == [False] * 3
    assert tracker.conclusion().rank == 1
    _, windows = track(steps(24, lambda i: {1: 0.05}), every=4)
    (changed,) = [window for window in windows if window.changed]
    assert (changed.first, changed.since) == (16, 0)


def test_the_report_is_a_table_in_rank_order_and_a_sentence() -> None:
    tracker, _ = track(steps(100, lambda i: {2: 0.05}, ranks=3, part=0), ranks=3)
    text = report(tracker, {0: "a", 1: "b", 2: "c"})
    rows = [line.split() for line in text.splitlines()[2:5]]
    assert [row[:2] for row in rows] == [["0", "a"], ["1", "b"], ["2", "c"]]
    assert rows[0][2:] == ["10.0", "100.0", "1.0", "50.0", "0", "0%"]
    assert rows[2][2:] == ["60.0", "100.0", "1.0", "0.0", "100", "100%"]
    assert text.splitlines()[5] == (
        "StragglerMonitor: rank 2 (host c) is always slow: the others wait 50 ms of each 150 ms step for it (33%),"
        " in data loading."
    )


def test_the_sentence_for_a_rank_that_is_slow_at_times_and_for_none() -> None:
    verdict = decided(steps(100, lambda i: {1: 0.4} if i % 10 == 5 else {}))
    assert conclusion_line(verdict, 0.1, {}) == (
        "StragglerMonitor: rank 1 is slow at times, in about 10 of 100 steps: the others then wait 400 ms for it"
        " (29% of all the time), in forward and backward."
    )
    assert "no rank stands out" in conclusion_line(NOBODY, 0.02, {})


def test_a_run_of_which_nothing_was_recorded_says_so() -> None:
    nothing = [step(i, {})._replace(measured=False) for i in range(30)]
    tracker, windows = track(nothing)
    assert not any(window.changed for window in windows)
    assert "could not be compared" in report(tracker, {}) and "TORCH_FR_BUFFER_SIZE" in report(tracker, {})


def test_the_figures_for_the_loggers() -> None:
    _, (window, *_) = track(steps(50, lambda i: {1: 0.1}))
    assert figures(window) == pytest.approx(
        {
            "straggler/rank": 1.0,
            "straggler/lost_share": 0.5,
            "straggler/lost_seconds": 0.1,
            "straggler/step_seconds": 0.2,
        }
    )


@pytest.mark.parametrize("every", [3, 8, 25, 50])
def test_where_gradients_are_accumulated_a_step_is_what_lies_between_two_reductions(every: int) -> None:
    """Rank 1 loads each batch for 10 ms more than rank 0; every eighth batch has a collective."""
    clock, comparer, number, given = [0.0, 0.0], StepComparer(), 0, []
    for batch in range(400):
        begin, calls = list(clock), {rank: list[CollectiveCallTime]() for rank in (0, 1)}
        clock = [clock[0] + 0.02, clock[1] + 0.03]
        if batch % 8 == 7:
            number += 1
            for rank, at in enumerate(clock):
                calls[rank] = [CollectiveCallTime("world", number, at, clock[1], 1)]
            clock = [clock[1]] * 2
        ranks = {
            rank: RankStep(batch, clock[rank] - begin[rank], 0.01 * rank, 0.0, calls[rank]) for rank in (0, 1)
        }
        given.append(comparer.compare(ranks, {}))
    tracker, windows = track(given, every=every)
    for verdict in (tracker.conclusion(), [one.verdict for one in windows if one.losses.steps][-1]):
        assert (verdict.rank, verdict.kind, verdict.where) == (1, "always", "data loading")
        assert verdict.share == pytest.approx(1 / 3, abs=0.02)
        assert verdict.lost == pytest.approx(0.08) and verdict.step_seconds == pytest.approx(0.24, abs=0.02)
    assert tracker.total.steps == 50
    fast, slow = (one.times for one in tracker.ranks())
    assert fast == pytest.approx((0.0, 0.16, 0.0, 0.08)) and slow == pytest.approx((0.08, 0.16, 0.0, 0.0))


# -- arrivals -------------------------------------------------------------------------------------------


def rank_step(arrivals: Sequence[tuple[float, float]], *, data: float = 0.0, part: int = 1) -> RankStep:
    calls = [
        CollectiveCallTime("world", number + 1, at, until, part)
        for number, (at, until) in enumerate(arrivals)
    ]
    return RankStep(5, 1.0, data, 0.0, calls)


def test_who_arrives_last_is_waited_for() -> None:
    ranks = {0: rank_step([(10.0, 11.0)]), 1: rank_step([(10.4, 11.0)]), 2: rank_step([(10.1, 11.0)])}
    compared = StepComparer().compare(ranks, {})
    assert compared.last == 1 and compared.cost == pytest.approx({1: 0.35})
    assert [compared.times[rank].waiting for rank in range(3)] == pytest.approx([0.4, 0.0, 0.3])
    assert [compared.times[rank].forward_and_backward for rank in range(3)] == pytest.approx([0.6, 1.0, 0.7])


def test_clocks_that_differ_are_set_right() -> None:
    ranks = {0: rank_step([(10.0, 11.0)]), 1: rank_step([(910.4, 911.0)])}
    compared = StepComparer().compare(ranks, {1: Clock(-900.0, 1e-4)})
    assert compared.cost == pytest.approx({1: 0.4}) and compared.times[0].waiting == pytest.approx(0.4)


def test_a_lead_that_a_call_did_not_stop_counts_once() -> None:
    # Rank 0 sends a broadcast and goes on, 0.3 s ahead; it waits at the reduction.
    ranks = {0: rank_step([(10.0, 10.1), (10.1, 11.0)]), 1: rank_step([(10.3, 10.4), (10.4, 11.0)])}
    assert StepComparer().compare(ranks, {}).cost == pytest.approx({1: 0.3})
    # Where it did wait at the first call, what it waits at the second comes on top.
    ranks = {0: rank_step([(10.0, 10.4), (10.4, 11.0)]), 1: rank_step([(10.3, 10.6), (10.6, 11.0)])}
    assert StepComparer().compare(ranks, {}).cost == pytest.approx({1: 0.5})


def test_waiting_in_a_callback_is_no_time_of_the_callback() -> None:
    calls = [CollectiveCallTime("world", 1, at, 11.0, 2) for at in (10.0, 10.5)]
    ranks = {rank: RankStep(0, 1.0, 0.0, 0.6, [call]) for rank, call in enumerate(calls)}
    compared = StepComparer().compare(ranks, {})
    assert compared.times[0] == pytest.approx((0.0, 0.4, 0.1, 0.5))
    assert compared.times[1] == pytest.approx((0.0, 0.4, 0.6, 0.0))


def test_a_collective_of_one_rank_alone_compares_nothing() -> None:
    compared = StepComparer().compare({0: rank_step([(10.0, 11.0)]), 1: rank_step([])}, {})
    assert not compared.measured and compared.last is None
