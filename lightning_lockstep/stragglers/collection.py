"""What rank 0 does with the steps that the ranks have sent: waits until all have come, then compares."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_lockstep.stragglers.comparison import Clock, StepComparer
from lightning_lockstep.stragglers.step_times import RankStep
from lightning_lockstep.stragglers.tracker import StragglerTracker, Window

__all__ = ["Collection"]

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
        self._steps: dict[int, dict[int, RankStep]] = {}  # by step and rank
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
                    self._steps.setdefault(step.step, {})[rank] = step
            if answer["reached"] > self._reached[rank]:
                self._reached[rank] = answer["reached"]
            if answer["final"]:
                self._finished.add(rank)
            if rank in self.missing:
                self.missing -= {rank}
            self._compare()
            self._note_cost(answer["cost"] + time.perf_counter() - began, steps)
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
            window = self.tracker.finish()
            if window is not None:
                self.windows.append(window)

    def _compare(self) -> None:
        there = [rank for rank in self._ranks if rank not in self.missing]
        reached = min((self._reached[rank] for rank in there), default=-1)
        for number in sorted(step for step in self._steps if step <= reached):
            ranks = self._steps.pop(number)
            self._compared = number
            window = self.tracker.add(self._comparer.compare(ranks, self._clocks))
            if window is not None:
                self.windows.append(window)

    def _note_cost(self, seconds: float, steps: Sequence[RankStep]) -> None:
        # The largest, but forgotten with time: one slow answer must not stop the questions for good.
        self.cost = max(seconds, 0.8 * self.cost)
        self.calls = max((len(step.calls) for step in steps), default=self.calls)
