"""How a rank measures its own steps, and how rank 0 takes what the ranks send; without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_lockstep import ConfigurationError, StragglerMonitor
from lightning_lockstep.distributed.side_channel.channel import Message
from lightning_lockstep.stragglers.exchange import Collection
from lightning_lockstep.stragglers.verdict import StragglerTracker
from lightning_lockstep.stragglers.waiting import OwnStep, StepTimer, _Wait
from tests.models.stragglers.fits import ALL, fit


def test_waiting_is_no_time_of_the_part_in_which_a_rank_waits() -> None:
    waits = [_Wait("callbacks", 1.0, 1.2), _Wait("forward and backward", 2.0, 2.3)]
    own = OwnStep(1.0, {"data loading": 0.1, "callbacks": 0.25}, waits)
    assert own.is_known and own.times() == pytest.approx((0.1, 0.35, 0.05, 0.5))


def test_actions_inside_others_and_waits_inside_others_count_for_the_outer_one() -> None:
    timer = StepTimer(torch.device("cpu"))
    assert timer.end() is None, "its begin was not seen"
    timer.enter("a", "callbacks")
    timer.enter("b", "data loading")
    timer.wait_begins()
    timer.wait_begins()
    timer.wait_ends()
    timer.wait_ends()
    timer.leave("b")
    timer.leave("a")
    own = timer.end()
    assert own is not None and own.parts["data loading"] == 0.0 and own.parts["callbacks"] > 0.0
    assert [wait.part for wait in own.waits] == ["callbacks"]
    timer.interrupt()
    assert timer.end() is None


def test_what_comes_after_the_backward_pass_itself_is_a_wait() -> None:
    timer, weight = StepTimer(torch.device("cpu")), torch.ones(2, requires_grad=True)
    timer.end()
    for is_measured in (True, False):
        loss = weight.square().sum() if is_measured else torch.ones(())
        timer.backward_begins(loss)
        if is_measured:
            loss.backward()
        timer.backward_ends()
        own = timer.end()
        assert own is not None and len(own.waits) == is_measured


# -- what rank 0 collects -------------------------------------------------------------------------------


def message(rank: int, first: int, last: int, *, final: bool = False) -> Message:
    steps = [[number, 0.0, 1.0, 0.0, 0.1] for number in range(first, last + 1)]
    return Message("straggler", rank, {"host": "h", "final": final, "reached": last, "steps": steps})


def collection(world_size: int = 2) -> Collection:
    return Collection(world_size, StragglerTracker(world_size, every_n_steps=10, min_share=0.05))


def test_steps_are_compared_when_the_last_rank_has_sent_them() -> None:
    rank_0 = collection()
    rank_0.take(message(0, 0, 29))
    assert rank_0.tracker.total.steps == 0
    rank_0.take(message(1, 0, 14))
    assert rank_0.tracker.total.steps == 15
    rank_0.take(message(1, 15, 29))
    assert rank_0.tracker.total.steps == 30
    assert [window.since for window in rank_0.windows] == [0, 20], "not after 10, which are too few"


def test_the_end_waits_for_nobody_who_is_missing() -> None:
    rank_0 = collection()
    rank_0.take(message(0, 0, 4, final=True))
    assert not rank_0.complete
    rank_0.finish()
    assert rank_0.missing == {1} and rank_0.tracker.total.steps == 5
    rank_0.take(message(1, 0, 4, final=True))
    assert rank_0.tracker.total.steps == 5, "what comes later is left out"
    assert rank_0.tracker.total.ranks[0].mean is not None and rank_0.tracker.total.ranks[1].mean is None


@pytest.mark.parametrize("given", [0, -1, 2.5, True])
def test_settings_that_cannot_be_used_are_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"every_n_steps=.*expected.*\n?.*min_share=1"):
        StragglerMonitor(every_n_steps=given, min_share=1)


@pytest.mark.filterwarnings("ignore")
def test_on_one_rank_there_is_nobody_to_wait_for() -> None:
    alone = fit(ALL, steps=4, strategy="auto", devices=1)
    assert [line for line in alone["lines"] if "there is one rank" in line] == alone["lines"] != []
