"""Where the time of a rank's own steps goes, and at which collectives the rank arrived during each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from lightning_lockstep.distributed.guard.calls.recorded import Arrival

__all__ = ["PARTS", "CollectiveCallTime", "OwnStep", "Part", "RankStep", "StepTimer", "described"]

Part = Literal["data loading", "forward and backward", "callbacks"]
#: Parts of a step; the second is all that the other two are not, optimizer and Lightning's own work included.
PARTS: tuple[Part, ...] = ("data loading", "forward and backward", "callbacks")

# Shorter visits to a callback or a loader do not contain a collective that somebody waits in [s].
_SHORTEST_SPAN = 2e-4


class _Span(NamedTuple):
    part: Part
    begin: float
    end: float


class OwnStep(NamedTuple):
    """One step as this rank has measured it; times by ``time.perf_counter()`` [s]."""

    step: int  # from 0, the same on every rank
    begin: float  # end of the step before
    end: float
    data: float  # in the loader
    callbacks: float  # in callbacks
    spans: tuple[_Span, ...]  # visits to the loader and to callbacks that took a while
    backwards: tuple[tuple[float, float], ...]  # begin and end of each


class CollectiveCallTime(NamedTuple):
    """When a rank arrived at a collective at which ranks may have waited."""

    group: str  # name of the process group
    number: int  # of the collective in its group
    time: float  # of arrival [s by the wall clock of the rank]
    until: float  # when the rank is known to have continued, likewise
    part: int  # of the step, as its place in PARTS


class RankStep(NamedTuple):
    """One step of one rank, as the ranks send it."""

    step: int
    seconds: float  # [s]
    data: float  # in the loader, waiting included [s]
    callbacks: float  # waiting included [s]
    calls: Sequence[CollectiveCallTime]  # in the order of arrival

    @classmethod
    def from_data(cls, data: Sequence[object]) -> RankStep:
        """Return what came through JSON as a list."""
        step, seconds, in_data, in_callbacks, calls = data
        return cls(step, seconds, in_data, in_callbacks, [CollectiveCallTime(*call) for call in calls])  # type: ignore


class StepTimer:
    """Measures the steps of this rank with a few reads of a clock each.

    ``enter`` and ``leave`` are called for each action of the Trainer that belongs to a part; what runs inside another
    such action counts for that one.
    """

    def __init__(self) -> None:
        self._open = ""
        self._open_part: Part = "callbacks"
        self._since = 0.0
        self._backward_since = 0.0
        self._begin: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._times: dict[Part, float] = {"data loading": 0.0, "callbacks": 0.0}
        self._spans: list[_Span] = []
        self._backwards: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Let the next step begin now; what was measured since the last one belongs to no step."""
        self._begin = time.perf_counter()
        self._open = ""
        self._clear()

    def interrupt(self) -> None:
        """Measure nothing until :meth:`begin`: what follows is no training step."""
        self._begin = None

    def enter(self, action: str, part: Part) -> None:
        if not self._open:
            self._open, self._open_part, self._since = action, part, time.perf_counter()

    def leave(self, action: str) -> None:
        if self._open == action:
            self._open = ""
            now = time.perf_counter()
            self._times[self._open_part] += now - self._since
            if now - self._since > _SHORTEST_SPAN:
                self._spans.append(_Span(self._open_part, self._since, now))

    def backward_begins(self) -> None:
        self._backward_since = time.perf_counter()

    def backward_ends(self) -> None:
        """Note the end of a backward pass, reductions of gradients included."""
        self._backwards.append((self._backward_since, time.perf_counter()))

    def end(self, step: int) -> OwnStep | None:
        """Return the step that ends now, or ``None`` if its begin was not seen; the next one begins."""
        begin, now, times = self._begin, time.perf_counter(), self._times
        self._begin = now
        done = None
        if begin is not None:
            data, callbacks = times["data loading"], times["callbacks"]
            done = OwnStep(step, begin, now, data, callbacks, tuple(self._spans), tuple(self._backwards))
        self._clear()
        return done


def described(
    steps: Sequence[OwnStep],  # in order
    arrivals: Sequence[Arrival],  # in order
    shift: float,  # from time.perf_counter() to this host's time.time() [s]
) -> list[RankStep]:
    """Return steps as they are sent, each with the collectives that the rank called during it.

    DDP's reducer calls the collectives of a backward pass without waiting for each, and waits at its end: of those the
    last one counts.
    """
    found: list[RankStep] = []
    position = 0
    for own in steps:
        while position < len(arrivals) and arrivals[position].time <= own.begin + shift:
            position += 1
        first = position
        while position < len(arrivals) and arrivals[position].time <= own.end + shift:
            position += 1
        calls = list(_calls(own, arrivals[first:position], shift))
        seconds = round(own.end - own.begin, 6)
        found.append(RankStep(own.step, seconds, round(own.data, 6), round(own.callbacks, 6), calls))
    return found


def _calls(own: OwnStep, arrivals: Sequence[Arrival], shift: float) -> Iterator[CollectiveCallTime]:
    backwards = [(begin + shift, end + shift) for begin, end in own.backwards]
    last_of: dict[tuple[int, str], Arrival] = {}
    kept: list[tuple[Arrival, float]] = []
    for arrival in arrivals:
        window = next((i for i, (a, b) in enumerate(backwards) if a <= arrival.time <= b), None)
        if window is None:
            kept.append((arrival, own.end + shift))
        else:
            last_of[window, arrival.group] = arrival
    kept += [(arrival, backwards[window][1]) for (window, _), arrival in last_of.items()]
    kept.sort(key=lambda one: one[0].time)
    for i, (arrival, until) in enumerate(kept):
        if i + 1 < len(kept):
            until = min(until, kept[i + 1][0].time)
        part = _part_at(own, arrival.time - shift)
        yield CollectiveCallTime(
            arrival.group, arrival.number, round(arrival.time, 6), round(until, 6), PARTS.index(part)
        )


def _part_at(own: OwnStep, at: float) -> Part:
    return next((span.part for span in own.spans if span.begin <= at <= span.end), "forward and backward")
