"""What ranks raise in attempts one after the other, with messages that arrive in any order: no process, no clock."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_lockstep._lightning import SIGTERMException
from lightning_lockstep.distributed import FailurePropagation, Gather, SideChannel
from lightning_lockstep.distributed.failure import propagation as module
from lightning_lockstep.distributed.failure.process_exit import Outcome
from lightning_lockstep.distributed.side_channel.channel import Message
from lightning_lockstep.errors import CollectiveStallError, ConfigurationError

RANKS = 3


class Wires:
    """What is under way between ranks: in order from each to each, in a random order otherwise."""

    def __init__(self, seed: int) -> None:
        self.channels = [WiredChannel(rank, self) for rank in range(RANKS)]
        self._under_way: dict[tuple[int, int], deque[Message]] = {
            (a, b): deque() for a in range(RANKS) for b in range(RANKS)
        }
        self._news, self._draws, self._ended = threading.Condition(), random.Random(seed), False
        self._thread = threading.Thread(target=self._deliver)
        self._thread.start()

    def send(self, sender: int, receiver: int, message: Message) -> None:
        with self._news:
            self._under_way[sender, receiver].append(message)
            self._news.notify_all()

    def end(self) -> None:
        with self._news:
            self._ended = True
            self._news.notify_all()
        self._thread.join()

    def _deliver(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._ended or any(self._under_way.values()))
                if self._ended:
                    return
                wire = self._draws.choice([wire for wire, those in self._under_way.items() if those])
                message = self._under_way[wire].popleft()
            self.channels[wire[1]]._deliver(message)


class WiredChannel(SideChannel):
    def __init__(self, rank: int, wires: Wires) -> None:
        super().__init__(rank, RANKS)
        self._wires = wires

    def _post(self, topic: str, body: Any, to: tuple[int, ...]) -> None:
        for receiver in to:
            self._wires.send(self.rank, receiver, Message(topic, self.rank, json.loads(json.dumps(body))))

    def end_of(self, rank: int, *, in_order: bool) -> None:
        """Note the end of another rank's process, as a channel does."""
        if in_order:
            self._note(rank, "closed")
            self._on_closed(rank)
        else:
            self._on_lost(rank)
            self.lose(rank)


@pytest.fixture(autouse=True)
def _nothing_ends_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    quiet = Outcome()
    monkeypatch.setattr(quiet, "force_exit_at_shutdown", lambda *args, **options: None)
    monkeypatch.setattr(module, "outcome", quiet)
    monkeypatch.setattr(module, "clock", SimpleNamespace(start=lambda: None, after=at_once))
    monkeypatch.setattr(module, "interrupt_clock", SimpleNamespace(start=lambda: None, after=lambda *_: None))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    return iter([None])


def at_once(_: float, function: Callable[..., object], *args: Any) -> None:
    threading.Thread(target=function, args=args).start()


class Rank:
    """A program that catches what each of its fits raises, and fits again."""

    def __init__(self, channel: WiredChannel, fits: Sequence[Mapping[int, Any]]) -> None:
        self.crash, self.fits, self.ends = FailurePropagation(channel), fits, list[str]()
        self.crash.folder, self.step = (lambda: None), Gather(channel, "step")
        self.crash._grace_ends = lambda record: None  # type: ignore[method-assign]
        self.others, self.thread = list[Rank](), threading.Thread(target=self._run)

    def _run(self) -> None:
        crash = self.crash
        for number, fit in enumerate(self.fits):
            event = fit.get(crash.channel.rank)
            if event in ("lost", "leaves"):
                while any(len(rank.ends) < number for rank in self.others):
                    time.sleep(0.001)
                for channel in crash.channel._wires.channels:  # type: ignore[attr-defined]
                    if channel.rank != crash.channel.rank and 0 in (channel.rank, crash.channel.rank):
                        channel.end_of(crash.channel.rank, in_order=event == "leaves")
                return
            try:
                crash.enter()
                if event == "before":
                    raise ValueError("before the others are there")
                crash.meet(20.0)
                if isinstance(event, BaseException):
                    raise event
                if event == "diagnosis":
                    crash.report_diagnosis(CollectiveStallError("rank 2 never came"))
                self.step.timeout = 20.0
                self.step.collect(number, None).complete("a step")
                crash.check()  # at the next boundary
                self.ends.append("")
            except Exception as error:
                raised = crash.error_to_raise(error)
                record = getattr(raised, "record", None)
                self.ends.append(type(raised).__name__ + (f" {record.rank}" if record else ""))
            crash.leave()


def ends_of(fits: Sequence[Mapping[int, Any]], seed: int) -> list[list[str]]:
    wires = Wires(seed)
    ranks = [Rank(channel, fits) for channel in wires.channels]
    for rank in ranks:
        rank.others = ranks
        rank.thread.start()
    for rank in ranks:
        rank.thread.join(60)
        assert not rank.thread.is_alive(), f"it waits in fit {len(rank.ends)}: {fits}, seed {seed}"
    wires.end()
    return [rank.ends for rank in ranks]


def one(rank: int) -> list[str]:
    return ["ValueError" if own == rank else f"RankFailedError {rank}" for own in range(RANKS)]


def boom() -> ValueError:
    return ValueError("boom")


FITTED = [""] * RANKS
#: The events of each fit, by rank, and with what each rank ends each fit.
CASES: dict[str, tuple[list[dict[int, Any]], list[list[str]]]] = {
    "nothing": ([{}, {}], [FITTED, FITTED]),
    "one rank": ([{1: boom()}, {}], [one(1), FITTED]),
    "rank 0": ([{0: boom()}, {}], [one(0), FITTED]),
    "two fits in a row": ([{1: boom()}, {2: boom()}, {}], [one(1), one(2), FITTED]),
    "three in a row": ([{2: boom()}, {2: boom()}, {0: boom()}, {}], [one(2), one(2), one(0), FITTED]),
    "all": ([dict.fromkeys(range(RANKS), boom()), {}], [["ValueError"] * RANKS, FITTED]),
    "all, an error of ours": (
        [{rank: ConfigurationError("no") for rank in range(RANKS)}, {}],
        [["ConfigurationError"] * RANKS, FITTED],
    ),
    "before the others are there": ([{}, {1: "before"}, {}], [FITTED, one(1), FITTED]),
    "a diagnosis": ([{0: "diagnosis", 1: "", 2: ""}, {}], [["CollectiveStallError"] * RANKS, FITTED]),
    "a lost rank": ([{}, {1: "lost"}, {}], [FITTED, *[["RankFailedError 1", "-", "RankFailedError 1"]] * 2]),
    "rank 0 is lost": ([{}, {0: "lost"}], [FITTED, ["-", "RankFailedError 0", "RankFailedError 0"]]),
    "a rank that leaves": ([{}, {2: "leaves"}], [FITTED, ["RankFailedError 2", "RankFailedError 2", "-"]]),
    "rank 0 leaves": ([{}, {0: "leaves"}], [FITTED, ["-", "RankFailedError 0", "RankFailedError 0"]]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fit_ends_as_its_first_failure_says(case: str) -> None:
    fits, expected = CASES[case]
    for seed in range(5):
        ends = ends_of(fits, seed)
        for rank, of_rank in enumerate(ends):
            assert of_rank == [fit[rank] for fit in expected if fit[rank] != "-"], f"rank {rank}, seed {seed}"


def test_of_two_failures_all_ranks_know_the_same_one() -> None:
    for seed in range(5):
        errors = {1: TypeError("one"), 2: ValueError("two")}
        wires = Wires(seed)
        ranks = [Rank(channel, [errors]) for channel in wires.channels]
        for rank in ranks:
            rank.thread.start()
        for rank in ranks:
            rank.thread.join(60)
        wires.end()
        first = {rank.crash.record.summary for rank in ranks if rank.crash.record is not None}
        assert len(first) == 1, f"seed {seed}: {first}"


@pytest.mark.parametrize(("in_order", "named"), [(True, 0), (False, 1)])
def test_a_rank_that_is_told_to_end_names_another_one_that_ended_in_disorder(
    in_order: bool, named: int
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    wires = Wires(0)
    crash, host = FailurePropagation(wires.channels[0]), socket.gethostname()
    crash._grace_ends = lambda record: None  # type: ignore[method-assign]
    wires.channels[0].processes.update({0: (host, os.getpid()), 1: (host, ended.pid)})
    try:
        crash.enter()
        if in_order:
            wires.channels[0].end_of(1, in_order=True)
        crash.error_to_raise(SIGTERMException(143))
        assert crash.record is not None and crash.record.rank == named
    finally:
        wires.end()
        wires.channels[0].close()


def test_a_second_ctrl_c_does_not_end_the_report_of_the_first() -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    wires = Wires(0)
    first, other = (FailurePropagation(channel) for channel in wires.channels[:2])
    try:
        for rank in (first, other):
            rank._grace_ends = lambda record: None  # type: ignore[method-assign]
            rank.enter()
        first.folder = lambda: signal.raise_signal(signal.SIGINT)  # it is asked for while the report is made
        pressed = raised = KeyboardInterrupt()
        try:
            first.error_to_raise(pressed)
        except KeyboardInterrupt as second:
            raised = second
        assert raised is pressed
        assert wires.channels[1].wait_for(lambda: other.failed, 20.0, stops=False)
        assert other.record is not None and (other.record.rank, other.record.kind) == (0, "interrupt")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, usual)
        wires.end()
        for channel in wires.channels:
            channel.close()
