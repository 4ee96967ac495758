"""What rank 0 does with what the others say, and when it asks once more."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_lockstep.distributed.guard import diagnosis
from lightning_lockstep.distributed.guard.collective_call import CollectiveCall
from lightning_lockstep.distributed.guard.diagnosis import StallDiagnosis
from lightning_lockstep.distributed.guard.observer import Activity
from lightning_lockstep.distributed.guard.rank_state import (
    Outstanding,
    RankState,
    RecordedCall,
)
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
    """The side channel of rank 0 to the other one of two, which answers from a list."""

    world_size = 2

    rank = 0

    def __init__(self, answers: Iterator[RankState], *, process: int = 0) -> None:
        self.news, self._process = threading.Condition(), process
        self._answers, self._handlers = answers, dict[str, Callable[[Message], None]]()
        self.asked = 0

    def on(self, topic: str, handler: Callable[[Message], None]) -> Callable[[], None]:
        self._handlers[topic] = handler
        return lambda: None

    def post(self, topic: str, body: Any = None, *, to: Any = None) -> None:
        if topic == "guard/where":
            self.asked += 1
            if (answer := next(self._answers, None)) is not None:
                self._handlers["guard/state"](Message("guard/state", 1, [body[0], asdict(answer)]))
        self._handlers[topic](Message(topic, 0, body))

    def process_of(self, rank: int) -> tuple[str, int]:
        return socket.gethostname(), self._process

    def has_closed(self, rank: int) -> bool:
        return False


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a process for stopped soon: nothing else runs in those of these tests."""
    monkeypatch.setattr(diagnosis, "_STOPPED_WITHIN", 0.1)


class Told:
    """Stands for the failures of the run: what was diagnosed."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None

    def report_diagnosis(self, error: BaseException) -> bool:
        self.error = error
        return True


TOLD = Told()


def diagnosis_of(channel: OtherRank, own: Callable[[], RankState]) -> StallDiagnosis:
    TOLD.__init__()  # type: ignore[misc]
    return StallDiagnosis(
        channel,  # type: ignore[arg-type]
        SimpleNamespace(state=lambda sites: own(), activity=Activity(1.0, lambda pid: True)),  # type: ignore[arg-type]
        TOLD,  # type: ignore[arg-type]
        TO_DO,
        stall_timeout=30.0,
        window=0.1,
    )


TO_DO: queue.SimpleQueue[Any] = queue.SimpleQueue()


def work(stall: StallDiagnosis) -> None:
    """Do what the guard's thread does until there is no open request any more."""
    end = time.monotonic() + 30.0
    while (stall.is_busy or not TO_DO.empty()) and not TOLD.failed and time.monotonic() < end:
        while not TO_DO.empty():
            TO_DO.get()()
        stall.work()
        time.sleep(0.01)


def asked(mine: list[RankState], theirs: list[RankState]) -> tuple[BaseException | None, int]:
    """Return what rank 0 concludes from what it finds of itself and of rank 1, and how often it has asked."""
    channel, own = OtherRank(iter(theirs)), iter(mine)
    stall = diagnosis_of(channel, lambda: next(own))
    stall.request(WANTED, 60.0)
    work(stall)
    return TOLD.error, channel.asked


def test_a_rank_that_comes_before_the_wait_is_too_long_is_no_stall() -> None:
    error, times = asked([WAITS, DONE], [NOT_YET, state(1, called=True, done=True)])
    assert error is None and times == 2


def test_a_rank_that_is_still_not_there_when_it_is_asked_again_is_one() -> None:
    error, times = asked([WAITS] * 3, [NOT_YET] * 3)
    assert "rank 1 never came" in str(error) and times == 3


def test_a_remark_is_made_again_once_the_wait_is_twice_as_long(caplog: pytest.LogCaptureFixture) -> None:
    at_work = replace(NOT_YET, moves=True)
    channel = OtherRank(iter([at_work] * 10))
    stall = diagnosis_of(channel, lambda: WAITS)
    for seconds in (60, 120, 180, 240, 300):
        stall.request(WANTED, seconds)
        work(stall)
    assert channel.asked == 10
    remarks = [record.getMessage().partition(" in ")[0] for record in caplog.records]
    assert remarks == [f"rank 0 has waited {seconds} s" for seconds in (60, 120, 240)]
