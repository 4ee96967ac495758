"""How a rank describes its own steps, and how rank 0 takes what the ranks send; without ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_lockstep.distributed.guard.records import Arrival
from lightning_lockstep.stragglers.exchange import Collection
from lightning_lockstep.stragglers.report import StragglerTracker
from lightning_lockstep.stragglers.verdict import (
    OwnStep,
    RankStep,
    StepTimer,
    _Span,
    described,
    part_of_action,
)
from tests.common.stragglers.fits import ALL, fit


def test_of_a_backward_pass_the_last_collective_counts() -> None:
    own = OwnStep(3, 10.0, 11.0, 0.1, 0.0, (), ((10.4, 10.9),))
    arrivals = [
        Arrival("world", number, 100.0 + at) for number, at in enumerate((9.9, 10.2, 10.5, 10.6, 10.7, 11.2))
    ]
    (found,) = described([own], arrivals, 100.0 - 0.0)
    # Times of the collectives are by the wall clock, 100 s later than the step's.
    assert [(call.number, call.time, call.until) for call in found.calls] == [
        (1, 110.2, 110.7),
        (4, 110.7, 110.9),
    ]
    assert (found.step, found.seconds, found.data) == (3, 1.0, 0.1)


def test_a_collective_in_a_callback_belongs_to_callbacks() -> None:
    own = OwnStep(0, 10.0, 11.0, 0.0, 0.3, (_Span("callbacks", 10.5, 10.8),), ())
    (found,) = described([own], [Arrival("world", 1, 10.3), Arrival("world", 2, 10.6)], 0.0)
    assert [call.part for call in found.calls] == [1, 2]


def test_what_is_sent_comes_back_from_json() -> None:
    own = OwnStep(0, 10.0, 11.0, 0.0, 0.3, (), ())
    (found,) = described([own], [Arrival("world", 1, 10.3)], 0.0)
    assert RankStep.from_data(json.loads(json.dumps(found))) == found


def test_actions_inside_others_count_for_the_outer_one() -> None:
    timer = StepTimer()
    assert timer.end(0) is None, "its begin was not seen"
    timer.enter("a", "callbacks")
    timer.enter("b", "data loading")
    timer.leave("b")
    timer.leave("a")
    own = timer.end(1)
    assert own is not None and own.data == 0.0 and own.callbacks > 0.0
    timer.interrupt()
    assert timer.end(2) is None


def test_which_actions_of_lightning_belong_to_what() -> None:
    assert part_of_action("[Callback]ModelCheckpoint{'monitor': None}.on_train_batch_end") == "callbacks"
    assert part_of_action("[_TrainingEpochLoop].train_dataloader_next") == "data loading"
    assert part_of_action("[Strategy]DDPStrategy.training_step") is None


# -- what rank 0 collects -------------------------------------------------------------------------------


def answer(number: int, first: int, last: int, **changes: Any) -> dict[str, Any]:
    # Step s ends with collective s + 1 at time s + 0.5.
    calls = {s: [["world", s + 1, s + 0.5, s + 1.0, 1]] for s in range(first, last + 1)}
    steps = [[s, 1.0, 0.0, 0.0, calls[s]] for s in range(first, last + 1)]
    usual = {"host": "h", "clock": [0.0, 0.0], "cost": 0.0, "final": False}
    return {**usual, "round": number, "reached": last, "steps": steps, **changes}


def collection(world_size: int = 2) -> Collection:
    tracker = StragglerTracker(world_size, every_n_steps=10, min_share=0.05)
    return Collection(world_size, tracker)


def test_steps_are_compared_when_the_last_rank_has_sent_them() -> None:
    rank_0 = collection()
    rank_0.take(0, answer(1, 0, 29))
    assert not rank_0.windows
    rank_0.take(1, answer(1, 0, 14))
    assert [window.first for window in rank_0.windows] == [0]
    rank_0.take(1, answer(2, 15, 29))
    assert [window.first for window in rank_0.windows] == [0, 10, 20]
    assert rank_0.tracker.total.steps == 30


def test_a_rank_that_does_not_answer_stops_nobody() -> None:
    rank_0 = collection(3)
    for number in (1, 2):
        assert not rank_0.give_up_on_silent(number)
        for rank in (0, 1):
            rank_0.take(rank, answer(number, 10 * number - 10, 10 * number - 1))
    assert not rank_0.windows
    assert rank_0.give_up_on_silent(3) == {2}
    assert [window.losses.steps for window in rank_0.windows] == [10, 10]
    assert not rank_0.give_up_on_silent(4), "it is said once"
    rank_0.take(2, answer(4, 0, 49))
    assert not rank_0.missing
    rank_0.take(0, answer(4, 20, 49))
    rank_0.take(1, answer(4, 20, 49))
    assert rank_0.tracker.total.steps == 50, "no step is compared twice"


def test_the_end_waits_for_nobody_who_is_missing() -> None:
    rank_0 = collection()
    rank_0.take(0, answer(1, 0, 4, final=True))
    assert not rank_0.complete
    rank_0.finish()
    assert rank_0.missing == {1}
    assert rank_0.tracker.ranks()[0].times is not None and rank_0.tracker.ranks()[1].times is None


@pytest.mark.parametrize("given", [0, -1, 2.5, True])
def test_settings_that_cannot_be_used_are_refused(given: Any) -> None:
    from lightning_lockstep import ConfigurationError, StragglerMonitor

    with pytest.raises(ConfigurationError, match=r"every_n_steps=.*expected.*\n?.*min_share=1"):
        StragglerMonitor(every_n_steps=given, min_share=1)


@pytest.mark.filterwarnings("ignore")
def test_on_one_rank_there_is_nobody_to_wait_for() -> None:
    alone = fit(ALL, steps=4, strategy="auto", devices=1)
    assert [line for line in alone["lines"] if "there is one rank" in line] == alone["lines"] != []
