"""Who is left of a run: what random kills of whole runs had found, each made to happen here, without processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_lockstep.distributed import FailurePropagation, SideChannel
from lightning_lockstep.distributed.failure import propagation as propagation_module
from lightning_lockstep.distributed.failure.interrupt import connections
from lightning_lockstep.distributed.failure.members import HostedMembers, Membership
from lightning_lockstep.distributed.failure.process_exit import ExitPlan
from lightning_lockstep.distributed.failure.record import FailureRecord, describe_error, describe_exit
from lightning_lockstep.distributed.process_group import forget_rendezvous
from lightning_lockstep.distributed.side_channel.channel import Message
from lightning_lockstep.errors import LaunchError, RankFailedError
from lightning_lockstep.launchers.outliving import OutlivingLauncher, _Layout, _Run
from tests.harness.patience import wait_until

KILLED = describe_exit(2, 3, 1234, -9)


class Run:
    """The first process, and members of which a test takes the part."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.hosted, self.members = HostedMembers(self._store), list[Membership]()

    def publish(self, *members: int, lost: FailureRecord | None = None, ends: bool = False) -> None:
        self.hosted.publish(members, [lost] if lost else [], ends=ends)

    def member(self, number: int) -> Membership:
        """Return a member that has connected with those of the generation that is there."""
        made = Membership(number, "127.0.0.1", self._store.port)
        self.members.append(made)
        for one in self.members:
            one._kept |= set(connections())  # all are in this process
        assert wait_until(lambda: made.newest.number == self.hosted.current.number)
        made.current = made.newest
        return made

    def is_ready(self, generation: int, member: int) -> None:
        self._store.set(f"ready/{generation}/{member}", '["another host", 1]')


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    forget_rendezvous()
    for member in made.members:
        member._stop_following()
        assert not member._thread.is_alive()  # else C++ would abort a process whose Python has ended


def test_a_connection_that_a_member_makes_after_the_news_is_ended_too(run: Run) -> None:
    run.publish(0, 1, 2)
    member = run.member(0)
    member._interrupt = SimpleNamespace(install=int, raise_soon=int)  # type: ignore[assignment] # it waits in C++
    run.publish(0, 1, lost=KILLED)
    run.is_ready(1, 1)
    with pytest.raises(RuntimeError), member:
        run.publish(0, lost=KILLED)
        assert wait_until(lambda: member.newest.number == 2)
        time.sleep(0.1)
        TCPStore(member.address, member.port, wait_for_workers=False).get("what nobody sets")
    assert member.ends_attempt(RuntimeError("gloo"))


def test_members_that_cannot_connect_though_all_live_ask_for_another_try(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_lockstep.distributed.failure.members._NEWS_WITHIN", 0.1)
    first = first_process(run, 3)
    member = run.member(0)
    looks = threading.Thread(target=lambda: wait_until(lambda: look(first) is None and run.hosted.current.number == 1))
    looks.start()
    assert member.ends_attempt(RuntimeError("gloo: connect timeout"))
    looks.join()
    assert (member.newest.members, member.newest.lost, member.newest.ends) == ((0, 1, 2), (), False)
    member.current, member._tries = member.newest, 4
    assert not member.ends_attempt(RuntimeError("gloo: connect timeout")), "the fifth try was the last"
    assert run.hosted.request() is None


# -- the first process --


def first_process(run: Run, ranks: int, *, spares: int = 0) -> _Run:
    """Return what publishes who is left of a run, once it has published the first generation."""
    return _Run(run.hosted, SideChannel(0, 1), _Layout(1, ranks, spares), 1, 10.0)


def look(first: _Run, **codes: int) -> int | None:
    """Let processes end with these codes; return that of the run if it is over."""
    for name, code in codes.items():
        first._channel._deliver(Message("ended", 0, [int(name.removeprefix("rank")), 100, code]))
    return first.look()


@pytest.mark.parametrize("again", [False, True])
def test_the_exit_code_says_that_rank_0_was_killed_after_the_last_call_unless_others_go_on(
    again: bool, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    first = first_process(run, 2)
    run.is_ready(0, 0), run.is_ready(0, 1)
    assert look(first, rank0=-9) is None
    assert run.hosted.current.members == (1,)
    if again:
        run.is_ready(1, 1)
    assert look(first, rank1=0) == (0 if again else 137)
    assert ("after the last call of a Trainer" in capsys.readouterr().err) is not again


def test_the_first_process_says_who_was_lost_if_nobody_is_left_to_say_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert look(first_process(run, 2), rank0=-9, rank1=-9) == 137
    assert "rank 1 of 2" in (said := capsys.readouterr().err) and "0 ranks left, and least_ranks=1" in said


def test_a_run_whose_members_all_end_while_one_asks_for_another_try_has_their_exit_code(run: Run) -> None:
    first = first_process(run, 2)
    run.hosted._store.set("asks/0", "")
    assert look(first, rank0=1, rank1=1) == 1


def test_a_host_that_is_lost_while_others_are_waited_for_ends_the_start_at_once() -> None:
    channel = SideChannel(0, 3)
    channel.processes[1] = "alpha", 100
    channel._note(1, "lost")
    launcher: Any = SimpleNamespace(num_nodes=3)
    with pytest.raises(LaunchError, match=r"Host alpha was lost before all 3 hosts"):
        OutlivingLauncher._wait_for_hosts(launcher, channel, 3600.0)


def test_a_spare_takes_a_place_and_the_name_of_the_lost_rank_but_not_after_the_first_call(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    first = first_process(run, 3, spares=3)
    look(first, rank0=-9)
    assert run.hosted.current.members == (1, 2, 3)
    look(first, rank3=-9, rank4=1)  # the other one was waiting
    assert run.hosted.current.members == (1, 2, 5)
    assert "a process that was to take a place has ended (exit code 1)" in capsys.readouterr().err
    assert [one.rank for one in run.hosted.current.lost] == [0]
    store = run.hosted._store
    store.set("waits/6", "")  # started in place of rank 0
    look(first)
    assert first._spares == [6]
    for member in (1, 2, 5):
        run.is_ready(2, member)
    look(first)
    assert not store.check(["first_call"])
    store.set("first_call", "over")
    look(first, rank2=-9)
    assert run.hosted.current.members == (1, 5)


def test_a_process_that_was_started_after_a_loss_joins_when_it_has_come_and_is_not_replaced(run: Run) -> None:
    first = first_process(run, 3, spares=1)
    look(first, rank0=-9, rank1=-9)
    assert run.hosted.current.members == (2, 3)
    assert first._newcomers == [4, 5]
    run.hosted._store.set("waits/5", "")
    look(first)
    assert run.hosted.current.members == (2, 3)  # who have not met yet
    run.is_ready(1, 2), run.is_ready(1, 3)
    look(first)
    assert (run.hosted.current.members, run.hosted.current.lost) == ((2, 3, 5), ())
    look(first, rank5=-9)
    assert (run.hosted.current.members, run.hosted.current.lost[0].rank) == ((2, 3), 1)
    assert first._newcomers == [4]


# -- an attempt of which a member is lost --


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The failure propagation of rank 1 of 2, whose clocks a test turns; and what would have ended the process."""
    later = list[tuple[float, Callable[..., object], tuple[Any, ...]]]()
    clock = SimpleNamespace(start=lambda: None, after=lambda *call: later.append((call[0], call[1], call[2:])))
    monkeypatch.setattr(propagation_module, "clock", clock)
    monkeypatch.setattr(propagation_module, "interrupt_clock", clock)
    monkeypatch.setattr(propagation_module, "exit_plan", ExitPlan())
    ended = list[FailureRecord]()
    made = FailurePropagation(SideChannel(1, 2))
    made.end_now = ended.append  # type: ignore[method-assign,assignment]
    yield SimpleNamespace(propagation=made, later=later, ended=ended)
    made._interrupt.remove()


def test_a_loss_that_came_before_the_attempt_was_entered_ends_it(attempt: Any) -> None:
    attempt.propagation.attempt.outlive(KILLED)
    attempt.propagation.enter()
    with pytest.raises(RankFailedError, match="rank 2 of 3"):
        attempt.propagation.check()


def test_no_countdown_of_a_loss_that_the_channel_has_seen_first_ends_a_rank_that_goes_on(
    attempt: Any,
) -> None:
    attempt.propagation.enter()
    attempt.propagation.attempt._decide(-1, KILLED)
    assert attempt.later
    attempt.propagation.attempt.outlive(KILLED)
    for _, function, arguments in attempt.later:
        if function == attempt.propagation._grace_ends:
            function(*arguments)
    assert not attempt.ended


def test_a_member_that_waits_at_the_end_of_a_call_hears_that_another_one_has_raised(run: Run, attempt: Any) -> None:
    run.publish(0, 1)
    member = run.member(0)
    member.propagation = lambda: attempt.propagation
    attempt.propagation.enter()
    raised = describe_error(ValueError("boom at the end"), 0, 2)
    news = threading.Timer(0.2, attempt.propagation.attempt._decide, (1, raised))
    ends = threading.Timer(20.0, run.publish, (0,), {"ends": True})  # so that it does not wait forever
    news.start(), ends.start()
    try:
        with pytest.raises(RankFailedError, match="boom at the end"):
            member.finish_call()
    finally:
        ends.cancel(), news.join()
