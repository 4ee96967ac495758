"""The states in which a failure leaves the ranks, with messages delivered in any order: no process, no clock."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from lightning_lockstep.distributed import FailurePropagation, SideChannel
from lightning_lockstep.distributed.failure import propagation as module
from lightning_lockstep.distributed.failure.process_exit import Outcome, outcome_of
from lightning_lockstep.distributed.side_channel.channel import Message, Post, receivers_of
from lightning_lockstep.errors import ConfigurationError, RankFailedError

RANKS = 3


class Wires:
    """What is under way between ranks: in order from each to each, in no order otherwise."""

    def __init__(self) -> None:
        self.channels = [WiredChannel(rank, self) for rank in range(RANKS)]
        self.under_way: dict[tuple[int, int], deque[Message]] = {
            (a, b): deque() for a in range(RANKS) for b in range(RANKS)
        }
        self.choose: Callable[[list[Any]], Any] = lambda wires: wires[0]
        self.held: set[tuple[int, int]] = set()  # wires on which nothing arrives for now

    def deliver(self, *wires: tuple[int, int]) -> None:
        """Deliver all that is under way on these wires, or on all; what that posts in turn, too."""
        chosen = set(wires or self.under_way) - self.held
        while full := [wire for wire in sorted(chosen) if self.under_way[wire]]:
            self.deliver_one(self.choose(full))

    def deliver_one(self, wire: tuple[int, int]) -> None:
        self.channels[wire[1]]._deliver(self.under_way[wire].popleft())


class WiredChannel(SideChannel):
    """Posts into wires; a rank that waits has what it waits for delivered, unless rank 0 is held."""

    def __init__(self, rank: int, wires: Wires) -> None:
        super().__init__(rank, RANKS)
        self.wires = wires

    def _put(self, post: Post) -> None:
        for receiver in receivers_of(post.to, self.rank, RANKS):
            body = json.loads(json.dumps(post.body))
            self.wires.under_way[self.rank, receiver].append(Message(post.topic, self.rank, body))

    def claim(self, key: str, value: str) -> str:
        raise AssertionError("nothing is claimed")

    def wait_for(
        self,
        news: threading.Condition,
        arrived: Callable[[], bool],
        timeout: float,
        *,
        needs_main: bool = True,
    ) -> bool:
        if not arrived() and timeout:
            self.wires.deliver((self.rank, 0), (0, self.rank))
        return arrived()

    def flush(self, timeout: float = 5.0) -> bool:
        return True

    def close(self, timeout: float = 2.0) -> None:
        pass


class Rank:
    """One rank's propagation, and what would happen on its threads after a while."""

    def __init__(self, channel: WiredChannel) -> None:
        self.crash = FailurePropagation(channel)
        self.timers: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.crash._later = lambda _, function, *args: self.timers.append((function, args))  # type: ignore[method-assign]
        self.is_raised = False

    def raises(self, error: BaseException) -> BaseException:
        self.is_raised = True
        return self.crash.error_to_raise(error)

    def begins(self) -> BaseException | None:
        try:
            self.is_raised = False
            self.crash.begin_fit()
        except RankFailedError as error:
            self.is_raised = True
            return error
        return None

    def stopped(self) -> str | None:
        """Return the summary of the failure that stops it here, or ``None``."""
        try:
            self.crash.check()
        except RankFailedError as error:
            self.is_raised = True
            return str(error.record.summary)  # type: ignore[attr-defined]
        return None

    def wait(self, function: str) -> None:
        """Let the time pass after which the function is called."""
        timers, self.timers = self.timers, []
        for later, args in timers:
            if later.__name__ == function:
                later(*args)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    quiet = Outcome()
    monkeypatch.setattr(quiet, "force_exit_at_shutdown", lambda *args, **options: None)
    monkeypatch.setattr(module, "outcome", quiet)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    return connected_ranks()


def connected_ranks() -> list[Rank]:
    made = [Rank(channel) for channel in Wires().channels]
    for rank in made:
        assert rank.begins() is None
    return made


def wires_of(ranks: list[Rank]) -> Wires:
    wires: Wires = ranks[0].crash.channel.wires  # type: ignore[attr-defined]
    return wires


def is_quiet(error: BaseException) -> bool:
    return outcome_of(error).instead == ""


def test_the_first_report_that_reaches_rank_0_wins(ranks: list[Rank]) -> None:
    errors = {2: ValueError("first"), 1: TypeError("second")}
    assert ranks[2].raises(errors[2]) is errors[2] and is_quiet(errors[2])
    second = ranks[1].raises(errors[1])
    assert isinstance(second, RankFailedError) and "rank 2 of 3" in str(second)
    assert ranks[0].stopped() == "ValueError: first"


def test_a_rank_that_rank_0_does_not_answer_prints_its_own_error(ranks: list[Rank]) -> None:
    wires_of(ranks).held.update({(0, rank) for rank in range(RANKS)})
    error = ValueError("alone")
    assert ranks[1].raises(error) is error and not is_quiet(error)
    assert ranks[1].begins() is None
    wires_of(ranks).held.clear()
    wires_of(ranks).deliver()
    assert ranks[1].stopped() is None, "the late answer is about a fit that is over"
    assert ranks[2].stopped() is None, "the program has caught it, and goes on"


def test_a_rank_that_has_caught_and_fails_again_stops_rank_0_in_the_next_fit(ranks: list[Rank]) -> None:
    ranks[1].raises(ValueError("caught"))
    ranks[1].begins()
    ranks[1].raises(TypeError("not caught"))
    assert ranks[0].stopped() is None, "it may yet raise what rank 1 has caught"
    error = ValueError("caught")
    assert ranks[0].raises(error) is error
    stopped = ranks[0].begins()
    assert isinstance(stopped, RankFailedError) and "TypeError: not caught" in str(stopped)


def test_an_error_that_all_should_raise_stops_a_rank_that_does_not(ranks: list[Rank]) -> None:
    for rank in (1, 0):
        error = ConfigurationError("on all")
        assert ranks[rank].raises(error) is error and is_quiet(error) is (rank == 1)
    wires_of(ranks).deliver()
    for rank in ranks:
        rank.wait("_doubt_ends")
    assert [rank.stopped() for rank in ranks] == [None, None, "ConfigurationError: on all"]


def test_an_end_of_a_process_is_got_over_by_no_fit(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.raises(ValueError("on all"))
    ranks[0].crash.report_child_exit(2, -9, 4711)  # what it ends is over already
    assert ranks[0].begins() is not None, "rank 2 will never come"
    wires_of(ranks).deliver()
    assert ranks[1].begins() is not None
    for rank in ranks[:2]:
        assert "killed by SIGKILL" in str(rank.begins()), "nor in any other fit"


def test_a_process_that_ends_after_an_error_of_all_is_known_by_that_error(ranks: list[Rank]) -> None:
    ranks[2].raises(ConfigurationError("alone"))
    ranks[0].crash.report_child_exit(2, 1, 4711)
    wires_of(ranks).deliver()
    assert ranks[0].stopped() == ranks[1].stopped() == "ConfigurationError: alone"


def test_a_lost_rank_0_is_noticed_by_every_rank_alone_and_one_of_them_prints(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for rank in ranks[1:]:
        rank.crash.channel._on_lost(0)  # type: ignore[misc]
        assert "its connection has ended without a report" in rank.stopped()
        assert rank.begins() is not None, "it will never come"
    assert [rank.crash.prints_report for rank in ranks[1:]] == [True, False]


def test_a_lost_rank_0_that_has_said_what_it_raises_is_known_by_that(ranks: list[Rank]) -> None:
    ranks[0].raises(ConfigurationError("on rank 0"))
    wires_of(ranks).deliver()
    ranks[1].crash.channel._on_lost(0)  # type: ignore[misc]
    assert ranks[1].stopped() == "ConfigurationError: on rank 0"
    assert not ranks[1].crash.prints_report, "rank 0 has printed it"


def test_a_rank_whose_program_has_caught_the_failure_is_not_ended_by_force(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module, "end_now", lambda code, text: ended.append(code))
    ranks[1].raises(ValueError("boom"))
    wires_of(ranks).deliver()
    ranks[0].stopped()
    ranks[0].begins()
    ranks[0].wait("_grace_ends")
    assert ended == []
    ranks[2].wait("_grace_ends")
    assert ended == [1]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_whatever_was_caught_the_next_failure_stops_all(first: int) -> None:
    """Ranks raise, catch, and begin fits, early and late, as messages arrive; then one fails for good."""
    for seed in range(first, first + 100):
        fail_in_the_end(connected_ranks(), random.Random(seed), f"seed {seed}")


def fail_in_the_end(ranks: list[Rank], draws: random.Random, which: str) -> None:
    wires = wires_of(ranks)
    wires.choose = draws.choice
    for _ in range(draws.randrange(40)):
        wires.held = {wire for wire in wires.under_way if draws.random() < 0.5}
        one_event(ranks, draws)
        if full := [wire for wire, messages in wires.under_way.items() if messages]:
            wires.deliver_one(draws.choice(full))
    wires.held = set()
    for _ in range(2 * RANKS):  # all come to rest in a fit
        wires.deliver()
        for rank in ranks:
            if rank.is_raised or rank.stopped() or rank.crash._over >= rank.crash._fit:
                rank.begins()
    wires.deliver()
    assert [rank.stopped() for rank in ranks] == [None] * RANKS, which
    failing, error = draws.choice(ranks), KeyError("for good")
    assert failing.raises(error) is error, which
    wires.deliver()
    stopped = [rank.stopped() for rank in ranks if rank is not failing]
    assert stopped == ["KeyError: 'for good'"] * (RANKS - 1), which


def one_event(ranks: list[Rank], draws: random.Random) -> None:
    """What a rank may do: raise, find out that it is to stop, or begin a fit with the others."""
    rank = draws.choice(ranks)
    if rank.is_raised:
        rank.begins()
        return
    fits = [other.crash._fit for other in ranks]
    may_begin = rank.crash._fit <= min(fits)  # a fit ends in collectives: no rank is two fits ahead
    event = draws.choice(["raise", "ours", "check", "begin" if may_begin else "check"])
    if event == "raise":
        rank.raises(draws.choice([ValueError("pruned"), TypeError("other")]))
    elif event == "ours":
        rank.raises(ConfigurationError("ours"))
        for other in ranks:
            if draws.random() < 0.3:
                other.wait("_doubt_ends")
    elif event == "check":
        rank.stopped()
    else:
        rank.begins()
