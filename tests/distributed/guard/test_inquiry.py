"""What the rank that collects does with what the others say: when it believes them, and when it asks once more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lightning_lockstep.distributed.guard.collective_call import CollectiveCall
from lightning_lockstep.distributed.guard.inquiry import Answer, Inquiries, Silence
from lightning_lockstep.distributed.guard.rank_state import Question, RankState
from lightning_lockstep.distributed.guard.records import Outstanding, RecordedCall
from lightning_lockstep.distributed.guard.verdict import Verdict
from lightning_lockstep.distributed.side_channel.channel import Message

WANTED = Outstanding("world", 1)


def state(rank: int, *, called: bool, done: bool = False) -> RankState:
    call = CollectiveCall(
        operation="all_reduce", group="world", number=1, dtypes=("float32",), shapes=((4,),)
    )
    return RankState(
        rank=rank,
        groups={"world": (0, 1)},
        calls=(RecordedCall(call=call, started=0.0, done=done),) if called else (),
        outstanding=(WANTED,) if called and not done else (),
        seconds_since_call=60.0,
    )


WAITS, DONE, NOT_YET = state(0, called=True), state(0, called=True, done=True), state(1, called=False)


class OtherRank:
    """Rank 0's side channel to a rank 1 that answers from a list."""

    rank, world_size = 0, 2

    def __init__(self, answers: Iterator[RankState]) -> None:
        self._answers, self._handlers = answers, dict[str, Callable[[Message], None]]()
        self.asked = 0

    def on(self, topic: str, handler: Callable[[Message], None]) -> Callable[[], None]:
        self._handlers[topic] = handler
        return lambda: None

    def post(self, topic: str, body: Any = None, *, to: int | None = None) -> None:
        if topic == "guard/where":
            self.asked += 1
            self._handlers["guard/state"](Message("guard/state", 1, [body[0], next(self._answers).to_data()]))

    def flush(self, timeout: float) -> None:
        del timeout


@dataclass
class OwnRank:
    """This rank, whose watch only keeps what comes of a question."""

    find: Callable[[], RankState]
    answers: list[Answer] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def state(self, sites: bool = False) -> RankState:
        return self.find()

    def silence(self, rank: int) -> Silence:
        return Silence("it does not answer")

    def decide(self, verdict: Verdict) -> None:
        pass

    def take_answer(self, answer: Answer) -> None:
        self.answers.append(answer)

    def tell(self, verdict: Verdict, states: Mapping[int, RankState]) -> None:
        self.remarks.append(verdict.text.partition(" in ")[0])

    def run_soon(self, function: Callable[[], None]) -> None:
        function()


def asked(mine: list[RankState], theirs: list[RankState]) -> tuple[list[Answer], int]:
    """Return what rank 0 concludes from what it finds of itself and of rank 1, and how often it has asked."""
    channel, own, concluded = OtherRank(iter(theirs)), iter(mine), list[Answer]()
    inquiries = Inquiries(
        channel,  # type: ignore[arg-type]
        OwnRank(lambda: next(own), answers=concluded),
        stall_timeout=30.0,
        history=0,
    )
    inquiries.ask(Question(rank=0, outstanding=WANTED, seconds=60.0))
    end = time.monotonic() + 30.0
    while inquiries.is_busy and time.monotonic() < end:
        inquiries.work()
        time.sleep(0.01)
    return concluded, channel.asked


def test_a_rank_that_comes_while_it_is_asked_is_no_stall() -> None:
    (answer,), times = asked([WAITS, DONE], [NOT_YET, state(1, called=True, done=True)])
    assert answer.verdict is None and times == 2


def test_a_rank_that_is_still_not_there_when_it_is_asked_again_is_one() -> None:
    (answer,), times = asked([WAITS, WAITS], [NOT_YET, NOT_YET])
    assert answer.verdict is not None and answer.verdict.kind == "stall" and times == 2


@pytest.mark.parametrize("theirs", [state(1, called=True, done=True), state(1, called=True)])
def test_what_all_have_called_long_ago_is_a_stall_once_it_is_found_twice(theirs: RankState) -> None:
    (answer,), times = asked([WAITS, WAITS], [theirs, theirs])
    assert answer.verdict is not None and "does not complete though ranks 0-1" in answer.verdict.text
    assert times == 2


def test_a_remark_is_made_again_once_the_wait_is_twice_as_long() -> None:
    at_work = replace(NOT_YET, moves=True)
    channel, remarks = OtherRank(iter([at_work] * 8)), list[str]()
    inquiries = Inquiries(
        channel,  # type: ignore[arg-type]
        OwnRank(lambda: WAITS, remarks=remarks),
        stall_timeout=30.0,
        history=0,
    )
    for seconds in (60, 120, 180, 240, 300):
        inquiries.ask(Question(rank=0, outstanding=WANTED, seconds=seconds))
    assert channel.asked == 5
    assert remarks == [f"rank 0 has waited {seconds} s" for seconds in (60, 120, 240)]
