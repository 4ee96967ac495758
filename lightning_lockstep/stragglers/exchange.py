"""Step times on their way to rank 0, and compared as soon as all have come."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.guard.records import ArrivalReader
from lightning_lockstep.distributed.side_channel.channel import Message, SideChannel
from lightning_lockstep.stragglers.report import StragglerTracker, Window, missing_line
from lightning_lockstep.stragglers.verdict import Clock, OwnStep, RankStep, StepComparer, described

# -- What rank 0 does with the steps that the ranks have sent: waits until all have come, then compares --

# A rank that has left so many questions unanswered is missing: the comparison goes on without it.
_PATIENCE = 2


class Collection:
    """Takes the answers of all ranks, in whatever order they come, and compares each step once."""

    def __init__(self, world_size: int, tracker: StragglerTracker) -> None:
        self.tracker, self.windows = tracker, deque[Window]()  # completed, and not taken yet
        self.hosts: dict[int, str] = {}
        self.missing: frozenset[int] = frozenset()  # ranks that do not answer
        # Lately: most collectives of a rank in a step; longest look-up on a rank, or comparison here [s].
        self.calls, self.cost = 0, 0.0
        self.news = threading.Condition(threading.RLock())  # notified of each answer
        self._ranks = range(world_size)
        self._comparer = StepComparer()
        self._clocks: dict[int, Clock] = {}
        self._steps: dict[int, dict[int, RankStep]] = defaultdict(dict)  # by step and rank
        self._reached = dict.fromkeys(self._ranks, -1)
        self._answered = dict.fromkeys(self._ranks, 0)
        self._finished: set[int] = set()
        self._compared = -1

    @property
    def complete(self) -> bool:
        """Whether the last steps of all ranks have come."""
        return len(self._finished) == len(self._ranks)

    def take(self, rank: int, answer: Mapping[str, Any]) -> None:
        """Take an answer, as :class:`StragglerExchange` makes it on that rank."""
        with self.news:
            began = time.perf_counter()
            self.hosts[rank] = answer["host"]
            self._clocks[rank] = Clock(*answer["clock"])
            self._answered[rank] = answer["round"]
            steps = [RankStep.from_data(step) for step in answer["steps"]]
            for step in steps:
                if step.step > self._compared:
                    self._steps[step.step][rank] = step
            self._reached[rank] = max(self._reached[rank], answer["reached"])
            if answer["final"]:
                self._finished.add(rank)
            self.missing -= {rank}
            self._compare()
            # The largest, but forgotten with time: one slow answer must not stop the questions for good.
            self.cost = max(answer["cost"] + time.perf_counter() - began, 0.8 * self.cost)
            self.calls = max((len(step.calls) for step in steps), default=self.calls)
            self.news.notify_all()

    def give_up_on_silent(self, question: int) -> frozenset[int]:  # number of the one asked now
        """Go on without the ranks that have left earlier questions unanswered; returns those that are new."""
        with self.news:
            silent = frozenset(rank for rank in self._ranks if self._answered[rank] < question - _PATIENCE)
            new, self.missing = silent - self.missing, self.missing | silent
            if new:
                self._compare()
            return new

    def finish(self) -> None:
        """Compare what has come, without the ranks whose last steps have not."""
        with self.news:
            self.missing = frozenset(self._ranks) - self._finished
            self._compare()
            self.windows.extend(filter(None, [self.tracker.finish()]))

    def _compare(self) -> None:
        there = [rank for rank in self._ranks if rank not in self.missing]
        reached = min((self._reached[rank] for rank in there), default=-1)
        for number in sorted(step for step in self._steps if step <= reached):
            ranks = self._steps.pop(number)
            self._compared = number
            window = self.tracker.add(self._comparer.compare(ranks, self._clocks))
            if window is not None:
                self.windows.append(window)


# -- How far this rank's clock is from rank 0's, found by messages there and back --

# Clocks drift apart by some 0.01 % at worst, so that the answers of the last two rounds or so are good enough.
_KEPT_ANSWERS = 16

_PING, _PONG = "clock/ping", "clock/pong"


class _Answer(NamedTuple):
    round_trip: float
    offset: float


class ClockOffset:
    """Estimates what to add to this rank's wall clock to get that of rank 0."""

    # The answer that was fastest there and back counts. Its error is at most half of that round trip, so a
    # difference below that is taken for none: on one host the clocks are the same.

    def __init__(self, channel: SideChannel) -> None:
        self._channel = channel
        self._answers: deque[_Answer] = deque(maxlen=_KEPT_ANSWERS)
        self._to_send = 0
        is_main = channel.rank == 0
        self._remove = channel.on(_PING, self._answer) if is_main else channel.on(_PONG, self._take)

    @property
    def error(self) -> float:
        """Return by how much the estimate may be wrong [s]; on rank 0, whose clock it is, by nothing."""
        return self._best().round_trip / 2

    @property
    def seconds(self) -> float:
        """Return what to add to this rank's ``time.time()`` [s]; 0 while nothing is known."""
        best = self._best()
        return best.offset if abs(best.offset) > best.round_trip / 2 else 0.0

    def measure(self, pings: int = 4) -> None:
        """Ask rank 0 for its time, one question after the other, and return at once."""
        if self._channel.rank != 0:
            idle, self._to_send = self._to_send <= 0, pings
            if idle:
                self._ask()

    def close(self) -> None:
        """Stop listening."""
        self._remove()

    def _best(self) -> _Answer:
        # A copy: answers arrive on another thread.
        return min(self._answers.copy(), default=_Answer(0.0, 0.0))

    def _ask(self) -> None:
        # The time is taken where the message is made, so that it does not count what was queued before it.
        self._channel.post(_PING, to=0, make=lambda _: time.time())

    def _answer(self, message: Message) -> None:
        self._channel.post(_PONG, message.body, to=message.sender, make=lambda sent: [sent, time.time()])

    def _take(self, message: Message) -> None:
        now = time.time()
        sent, theirs = message.body
        self._answers.append(_Answer(now - sent, theirs - (sent + now) / 2))
        self._to_send -= 1
        if self._to_send > 0:
            self._ask()


# -- Collects the figures of all ranks on rank 0: it asks, each rank answers after its next step, no rank
# waits

_log = logging.getLogger(__name__)
_ASK, _ANSWER = "straggler/ask", "straggler/answer"

# To look up the collectives stops a rank for some milliseconds: this share of the time at most.
_LARGEST_COST = 0.005
# Torch and we keep the last 512 collectives: ask before half of them are new.
_CALLS_BETWEEN = 256
# Steps that a rank keeps where nobody asks.
_KEPT_STEPS = 5000

_fits = itertools.count()


class StragglerExchange:
    """Sends this rank's steps to rank 0 when rank 0 asks; one object on every rank for each fit."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        every_n_steps: int,  # rank 0 asks; later if that costs too much, earlier with many collectives
        min_share: float,
    ) -> None:
        channel, world_size = communicator.side_channel, communicator.world_size
        self._channel, self._host, self._every = channel, communicator.host, every_n_steps
        self.collection: Collection | None = None  # of rank 0
        if communicator.is_main:
            tracker = StragglerTracker(world_size, every_n_steps=every_n_steps, min_share=min_share)
            self.collection = Collection(world_size, tracker)
        self._fit = next(_fits)
        self._clock, self._reader = ClockOffset(channel), ArrivalReader()
        self._steps: list[OwnStep] = []
        self._reached = -1
        self._asked = self._answered = 0
        self._asked_at = time.monotonic()
        self._sent = threading.Event()
        self._remove = channel.on(_ASK, self._take_question)
        self._remove_answers = channel.on(_ANSWER, self._take_answer) if communicator.is_main else None
        self._clock.measure(8)

    def step_done(self, number: int, own: OwnStep | None) -> None:  # own None: not measured
        """Note a step, ask if it is time to (rank 0), and answer if asked; from the main thread."""
        self._reached = number
        if own is not None:
            self._steps.append(own)
            if len(self._steps) > _KEPT_STEPS:
                del self._steps[: _KEPT_STEPS // 2]
        if self.collection is not None and self._is_time(self.collection):
            self._ask(self.collection)
        if self._asked != self._answered:
            self._answer(final=False)

    def finish(self, timeout: float) -> None:  # of rank 0 [s]; 0 after a failure
        """Send the last steps; rank 0 waits for those of the others and compares what has come."""
        self._answer(final=True)
        if timeout > 0:
            # By this rank's own sending thread: afterwards the process groups may be destroyed, with their names.
            self._sent.wait(timeout)
        collection = self.collection
        if collection is not None:
            with collection.news:
                if timeout > 0:
                    self._channel.wait_for(collection.news, lambda: collection.complete, timeout)
                collection.finish()

    def close(self) -> None:
        self._remove()
        self._clock.close()
        if self._remove_answers is not None:
            self._remove_answers()

    def _is_time(self, collection: Collection) -> bool:
        steps = len(self._steps)
        if steps < self._every and steps * collection.calls < _CALLS_BETWEEN:
            return False
        return time.monotonic() - self._asked_at >= collection.cost / _LARGEST_COST

    def _ask(self, collection: Collection) -> None:
        self._asked += 1
        self._asked_at = time.monotonic()
        missing = collection.give_up_on_silent(self._asked)
        if missing:
            _log.warning("%s", missing_line(missing))
        self._channel.post(_ASK, [self._fit, self._asked])

    def _answer(self, *, final: bool) -> None:
        self._answered = self._asked
        steps, self._steps = self._steps, []
        self._channel.post(_ANSWER, (self._answered, steps, self._reached, final), to=0, make=self._made)

    def _made(self, body: tuple[int, list[OwnStep], int, bool]) -> dict[str, Any]:
        """Make the answer, on the thread that sends it."""
        number, steps, reached, final = body
        try:
            shift = time.time() - time.perf_counter()
            arrivals = self._reader.read(steps[0].begin + shift) if steps else []
            clock = [self._clock.seconds, self._clock.error]
            self._clock.measure()
            return {
                "fit": self._fit,
                "round": number,
                "final": final,
                "reached": reached,
                "host": self._host,
                "clock": clock,
                "cost": self._reader.seconds,
                "steps": described(steps, arrivals, shift),
            }
        finally:
            if final:
                self._sent.set()

    def _take_question(self, message: Message) -> None:
        fit, number = message.body
        if fit == self._fit:
            self._asked = number

    def _take_answer(self, message: Message) -> None:
        if self.collection is not None and message.body["fit"] == self._fit:
            self.collection.take(message.sender, message.body)
