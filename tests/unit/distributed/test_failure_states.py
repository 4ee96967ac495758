"""The states in which a failure leaves the ranks, with messages delivered in any order: no process, no clock."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_lockstep.distributed import FailurePropagation, SideChannel
from lightning_lockstep.distributed.failure import propagation as module
from lightning_lockstep.distributed.failure.process_exit import Outcome, ending_of
from lightning_lockstep.distributed.failure.propagation import Failure
from lightning_lockstep.distributed.side_channel.channel import Message
from lightning_lockstep.errors import (
    CollectiveMismatchError,
    CollectiveStallError,
    ConfigurationError,
    RankFailedError,
)

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

    def _post(self, topic: str, body: Any, to: tuple[int, ...]) -> None:
        for receiver in to:
            sent = json.loads(json.dumps(body))
            self.wires.under_way[self.rank, receiver].append(Message(topic, self.rank, sent))

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


class Rank:
    """One rank's propagation, and what would happen on its threads after a while."""

    def __init__(self, channel: WiredChannel) -> None:
        self.crash = FailurePropagation(channel)
        self.timers: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.crash._later = lambda _, function, *args: self.timers.append((function, args))
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
    monkeypatch.setattr(module, "clock", SimpleNamespace(start=lambda: None, after=None))
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


def numbers(ranks: list[Rank]) -> list[int]:
    return [rank.crash.fit for rank in ranks]


def is_quiet(error: BaseException) -> bool:
    ending = ending_of(error)
    return ending.replaces and not ending.text


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
    wires_of(ranks).held.clear()
    wires_of(ranks).deliver()
    assert [rank.stopped() for rank in (ranks[0], ranks[2])] == ["ValueError: alone"] * 2


def test_what_all_have_raised_and_caught_is_over_and_its_late_reports_stop_nobody(ranks: list[Rank]) -> None:
    late = Failure(1, ranks[1].crash.describe(ValueError("on all")))
    for rank in ranks:
        rank.raises(ValueError("on all"))
    wires_of(ranks).deliver()
    assert [rank.begins() for rank in ranks] == [None] * RANKS
    assert numbers(ranks) == [2] * RANKS
    ranks[1].crash.channel.post("failure", late.body(), to=0)
    wires_of(ranks).deliver()
    assert [rank.stopped() for rank in ranks] == [None] * RANKS


@pytest.mark.parametrize("who", range(RANKS))
def test_a_rank_that_alone_goes_on_ends_its_fit_and_all_others_with_what_it_has_raised(
    ranks: list[Rank], who: int
) -> None:
    """The others sit in a collective with it, until the process of this one or their grace period ends."""
    ranks[who].raises(ValueError("caught"))
    wires_of(ranks).deliver()
    alone = ranks[who].begins()
    assert isinstance(alone, RankFailedError) and f"rank {who} of 3" in str(alone)
    wires_of(ranks).deliver()
    for rank in ranks:
        if rank is not ranks[who]:
            stopped = rank.raises(RuntimeError("Connection closed by peer"))
            assert isinstance(stopped, RankFailedError) and "ValueError: caught" in str(stopped)
    for rank in (*ranks, *ranks):
        assert isinstance(rank.begins(), RankFailedError), "nor do they meet in any further fit"


def test_a_rank_that_is_alone_is_heard_though_rank_0_has_failed_in_the_same_fit(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.raises(ValueError("on all"))
    wires_of(ranks).held = {(0, 2)}  # that all have raised does not reach it
    wires_of(ranks).deliver()
    wires_of(ranks).held = {(2, 0), (0, 2)}
    assert isinstance(ranks[2].begins(), RankFailedError)
    assert ranks[0].begins() is None
    ranks[0].raises(TypeError("in the next fit"))
    wires_of(ranks).held = set()
    wires_of(ranks).deliver()
    assert "ValueError: on all" in str(ranks[0].begins()), "rank 2 will begin no further fit"


def test_a_rank_that_comes_late_to_the_error_of_all_is_waited_for(ranks: list[Rank]) -> None:
    for rank in ranks[:2]:
        rank.raises(ValueError("on all"))
    ranks[0].crash.channel.wait_for = lambda *_, **__: (
        ranks[2].raises(ValueError("on all")),
        wires_of(ranks).deliver(),
        True,
    )[-1]
    assert [rank.begins() for rank in ranks] == [None] * RANKS
    assert numbers(ranks) == [2] * RANKS


def test_a_failure_at_the_end_of_a_fit_stops_those_that_have_begun_the_next(ranks: list[Rank]) -> None:
    for rank in (ranks[0], ranks[2]):
        assert rank.begins() is None
    ranks[1].raises(ValueError("in its last hook"))
    wires_of(ranks).deliver()
    assert [rank.stopped() for rank in (ranks[0], ranks[2])] == ["ValueError: in its last hook"] * 2
    wires_of(ranks).deliver()
    assert [rank.begins() for rank in ranks] == [None] * RANKS
    assert numbers(ranks) == [2] * RANKS


@pytest.mark.parametrize("heard_first", [1, 2])
def test_of_failures_of_two_fits_the_earlier_one_ends_all(ranks: list[Rank], heard_first: int) -> None:
    """Rank 2 fails before it meets the others in the next fit, while rank 1 fails in the last hook of the first."""
    wires = wires_of(ranks)
    assert ranks[2].begins() is None
    wires.held = {(wire, 0) for wire in range(RANKS)} | {(0, wire) for wire in range(RANKS)}
    ranks[2].raises(KeyError("before they meet"))
    ranks[1].raises(ValueError("in the last hook"))
    wires.held = set()
    wires.deliver((heard_first, 0))
    wires.deliver()
    assert ranks[0].stopped() is not None
    wires.deliver()
    assert [rank.begins() for rank in ranks] == [None] * RANKS
    assert numbers(ranks) == [2] * RANKS


def test_a_message_about_a_fit_that_a_rank_has_not_begun_is_kept(ranks: list[Rank]) -> None:
    for rank in ranks[:2]:
        assert rank.begins() is None
    ranks[1].raises(ValueError("in the next fit"))
    wires_of(ranks).deliver()
    assert ranks[2].stopped() is None, "it is still in the one before"
    assert "in the next fit" in str(ranks[2].begins())


def test_what_runs_on_each_rank_alone_is_no_fit_of_all(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.raises(ValueError("on all"))
    wires_of(ranks).deliver()
    for rank in ranks:
        rank.crash.join()
        rank.raises(TypeError("on all, each alone"))
    wires_of(ranks).deliver()
    assert [rank.begins() for rank in ranks] == [None] * RANKS
    assert len(set(numbers(ranks))) == 1


@pytest.mark.parametrize("first", range(RANKS))
def test_what_one_rank_alone_ran_after_an_error_of_all_changes_no_number(
    ranks: list[Rank], first: int
) -> None:
    for rank in ranks:
        rank.raises(ValueError("on all"))
    wires_of(ranks).deliver()
    ranks[0].crash.join()
    for rank in (*ranks[first:], *ranks[:first]):
        assert rank.begins() is None
    assert numbers(ranks) == [2] * RANKS


def test_a_diagnosis_is_raised_on_all_ranks_and_none_reports_it_back(ranks: list[Rank]) -> None:
    interrupted: list[str] = []
    for rank in ranks:
        rank.crash.interrupt = lambda error: interrupted.append(type(error).__name__)
    error = CollectiveMismatchError("ranks disagree\n\n  a table")
    assert ranks[0].crash.report_diagnosis(error, {})
    assert not ranks[0].crash.report_diagnosis(CollectiveStallError("again"), {})
    wires_of(ranks).deliver()
    for rank in ranks:
        rank.wait("_end_waits")
    assert interrupted == ["CollectiveMismatchError"] * RANKS
    raised = [ranks[0].raises(error), ranks[1].raises(RuntimeError("Connection closed by peer"))]
    with pytest.raises(CollectiveMismatchError) as checked:
        ranks[2].crash.check()
    assert [str(one) for one in (*raised, checked.value)] == [str(error)] * RANKS
    assert [is_quiet(one) for one in (*raised, checked.value)] == [False, True, True]
    left = [message.topic for wire in wires_of(ranks).under_way.values() for message in wire]
    assert "failure" not in left
    wires_of(ranks).deliver()
    with pytest.raises(CollectiveMismatchError):
        ranks[1].crash.begin_fit()


@pytest.mark.parametrize("who", [1, 2])
def test_a_process_that_ends_after_its_report_is_known_by_that(ranks: list[Rank], who: int) -> None:
    """What breaks in the others then is a consequence of what it has said."""
    ranks[who].raises(ValueError("boom"))
    wires_of(ranks).deliver()
    ranks[0].crash.report_child_exit(who, 1, 4711)
    wires_of(ranks).deliver()
    for rank in ranks:
        if rank is not ranks[who]:
            stopped = rank.raises(RuntimeError("Connection closed by peer"))
            assert "ValueError: boom" in str(stopped) and "exit code" not in str(stopped)
    assert "exit code 1" in str(ranks[0].begins()), "of a process that has ended there is no next fit"


def test_an_error_before_any_fit_is_one(ranks: list[Rank]) -> None:
    """Ranks that another program has connected, and whose first Trainer is refused."""
    made = [Rank(channel) for channel in Wires().channels]
    for rank in made:
        rank.crash.join()
        error = ConfigurationError("on all")
        assert rank.raises(error) is error
    wires_of(made).deliver()
    assert [rank.begins() for rank in made] == [None] * RANKS
    assert numbers(made) == [2] * RANKS, "the first one failed before it began"


def test_an_error_between_two_fits_stops_nobody_who_is_still_in_the_first(ranks: list[Rank]) -> None:
    error = ConfigurationError("on all")
    ranks[1].crash.join()  # its next Trainer is refused
    assert ranks[1].raises(error) is error
    wires_of(ranks).deliver()
    assert [rank.stopped() for rank in (ranks[0], ranks[2])] == [None, None]
    for rank in (ranks[0], ranks[2]):
        rank.crash.join()
        assert rank.raises(error) is error
    wires_of(ranks).deliver()
    assert [rank.begins() for rank in ranks] == [None] * RANKS


def test_a_failure_explains_more_than_a_diagnosis(ranks: list[Rank]) -> None:
    ranks[1].raises(ValueError("boom"))
    assert not ranks[0].crash.report_diagnosis(CollectiveStallError("rank 1 never came"), {})
    assert ranks[0].stopped() == "ValueError: boom"


@pytest.mark.usefixtures("ranks")
def test_what_arrives_before_a_rank_begins_finds_the_settings_of_the_user() -> None:
    """Its countdown is the user's, and the ranks that it has started are ended."""
    wires = Wires()
    early = FailurePropagation(wires.channels[1])
    failure = Failure(1, replace(early.describe(ValueError("early")), rank=0))
    wires.channels[0].post("failure", failure.body(), to=1)
    wires.deliver()
    assert early.record is None
    timers: list[float] = []
    early._later = lambda seconds, *_: timers.append(seconds)
    early.grace_period = 100.0
    with pytest.raises(RankFailedError):
        early.begin_fit()
    assert timers == [90.0]


def test_an_error_that_all_should_raise_stops_a_rank_that_does_not(ranks: list[Rank]) -> None:
    for rank in (1, 0):
        error = ConfigurationError("on all")
        assert ranks[rank].raises(error) is error and is_quiet(error) is (rank == 1)
        if rank == 0:
            assert ending_of(error).text == "" and "(host" in ending_of(error).headline, "its message is all"
    wires_of(ranks).deliver()
    assert [rank.stopped() for rank in ranks] == [None, None, "ConfigurationError: on all"]


def test_an_end_of_a_process_is_got_over_by_no_fit(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.raises(ValueError("on all"))
    ranks[0].crash.report_child_exit(2, -9, 4711)  # what it ends is over already
    wires_of(ranks).deliver()
    assert ranks[0].begins() is not None, "rank 2 will never come"
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


def test_a_rank_0_that_is_lost_after_an_error_of_all_is_reported_by_the_next_rank(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.raises(ConfigurationError("on all"))
    wires_of(ranks).deliver()
    ranks[1].crash.channel._on_lost(0)  # type: ignore[misc]
    assert "its connection has ended without a report" in str(ranks[1].begins())
    assert ranks[1].crash.prints_report


def test_a_rank_that_has_raised_the_same_is_not_ended_by_force(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module, "end_now", lambda code, text: ended.append(code))
    ranks[1].raises(ValueError("boom"))
    wires_of(ranks).deliver()
    assert ranks[0].raises(ValueError("boom")) is not None
    ranks[0].wait("_grace_ends")
    assert ended == [], "it ends by its own error"
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
    may_be_alone = draws.random() < 0.3
    for _ in range(draws.randrange(40)):
        wires.held = {wire for wire in wires.under_way if draws.random() < 0.5}
        one_event(ranks, draws, may_be_alone=may_be_alone)
        if full := [wire for wire, messages in wires.under_way.items() if messages]:
            wires.deliver_one(draws.choice(full))
    wires.held = set()
    for _ in range(2 * RANKS):  # those that are stopped raise; then all begin the next fit
        wires.deliver()
        for rank in ranks:
            rank.stopped()
        wires.deliver()
        if any(rank.is_raised for rank in ranks):
            for rank in ranks:
                if not rank.is_raised:
                    rank.raises(ValueError("pruned"))
            wires.deliver()
            for rank in ranks:
                rank.begins()
    wires.deliver()
    if any(rank.crash._last is not None for rank in ranks):
        assert all(isinstance(rank.begins(), RankFailedError) for rank in ranks), which
        return
    for rank in ranks:  # one may still be in the fit before
        if rank.crash.fit < max(numbers(ranks)):
            assert rank.begins() is None, which
    assert len(set(numbers(ranks))) == 1, which
    failing, error = draws.choice(ranks), KeyError("for good")
    assert failing.raises(error) is error, which
    wires.deliver()
    stopped = [rank.stopped() for rank in ranks if rank is not failing]
    assert stopped == ["KeyError: 'for good'"] * (RANKS - 1), which


def one_event(ranks: list[Rank], draws: random.Random, *, may_be_alone: bool) -> None:
    """What a rank may do: raise, find out that it is to stop, or begin a fit with the others."""
    rank = draws.choice(ranks)
    if rank.is_raised:
        if may_be_alone or all(other.is_raised or other.crash.fit > rank.crash.fit for other in ranks):
            rank.begins()
        return
    may_begin = rank.crash.fit <= min(numbers(ranks))  # a fit ends in collectives: no rank is two fits ahead
    event = draws.choice(["raise", "ours", "check", "begin" if may_begin else "check"])
    if event == "raise":
        rank.raises(draws.choice([ValueError("pruned"), TypeError("other")]))
    elif event == "ours":
        rank.raises(ConfigurationError("ours"))
    elif event == "check":
        rank.stopped()
    else:
        rank.begins()
