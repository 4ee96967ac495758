"""Step times of all ranks compared, and which rank the others wait for."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from lightning_lockstep.distributed.guard.records import Arrival

# -- Where the time of a rank's own steps goes, and at which collectives the rank arrived during each --

Part = Literal["data loading", "forward and backward", "callbacks"]


def part_of_action(action: str) -> Part | None:
    """Return what an action belongs to, by the name that Lightning's profilers know it by."""
    if action.startswith("[Callback]"):  # such as "[Callback]ModelCheckpoint{...}.on_train_batch_end"
        return "callbacks"
    return "data loading" if action.endswith(".train_dataloader_next") else None


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
    """Measures the steps of this rank with a few reads of a clock each."""

    # ``enter`` and ``leave`` are called for each action of the Trainer that belongs to a part; what runs
    # inside another such action counts for that one.

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

    def interrupt(self) -> None:
        """Measure nothing until :meth:`end`: what follows is no training step."""
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
    """Return steps as they are sent, each with the collectives that the rank called during it."""
    # DDP's reducer calls the collectives of a backward pass without waiting for each, and waits at its end:
    # of those the last one counts.
    times = [arrival.time for arrival in arrivals]
    found: list[RankStep] = []
    for own in steps:
        during = arrivals[bisect_right(times, own.begin + shift) : bisect_right(times, own.end + shift)]
        seconds, data, callbacks = (round(one, 6) for one in (own.end - own.begin, own.data, own.callbacks))
        found.append(RankStep(own.step, seconds, data, callbacks, list(_calls(own, during, shift))))
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


# -- One step of all ranks side by side: who arrived last, and how long the others waited for it --

# How much later than a rank went on another one may seem to have arrived without being later in truth [s].
_TOLERANCE = 5e-4


class Clock(NamedTuple):
    """A rank's wall clock against rank 0's."""

    offset: float = 0.0  # to add to get rank 0's [s]
    error: float = 0.0  # by how much that may be wrong [s]


class RankTimes(NamedTuple):
    """Where the time of a rank's step went [s]; the parts are without the waiting in them."""

    data_loading: float
    forward_and_backward: float
    callbacks: float
    waiting: float


class ComparedStep(NamedTuple):
    """One step of all ranks."""

    step: int
    seconds: float  # length, the median of the ranks
    cost: Mapping[int, float]  # how long others waited for a rank, on average [s]; none for others
    times: Mapping[int, RankTimes]
    measured: bool  # whether two ranks at least are known to have called one collective

    @property
    def last(self) -> int | None:
        """The rank for which the others waited longest, ``None`` if they waited for nobody."""
        return max(self.cost, key=self.cost.__getitem__, default=None)


def joined(first: ComparedStep, then: ComparedStep) -> ComparedStep:
    """Return two steps as one: the first has no collective, so its delays show in the next."""
    times = {
        rank: RankTimes(*map(sum, zip(first.times[rank], then.times[rank], strict=True)))
        for rank in first.times.keys() & then.times.keys()
    }
    return then._replace(seconds=first.seconds + then.seconds, times=times)


class StepComparer:
    """Compares steps, which it must be given in order."""

    # A rank that goes on before the last one has arrived did not wait in that call. It is still ahead at the
    # next, so only what was added to its lead counts there; where a rank did wait, it has no lead any more.

    def __init__(self) -> None:
        self._lead: dict[int, float] = {}

    def compare(self, ranks: Mapping[int, RankStep], clocks: Mapping[int, Clock]) -> ComparedStep:
        """Compare the same step of all ranks; a clock that is missing is that of rank 0."""
        cost: dict[int, float] = defaultdict(float)
        waits: dict[int, list[float]] = {rank: [0.0] * len(PARTS) for rank in ranks}
        points = _points(ranks, clocks)
        for point in points:
            last = max(point, key=lambda rank: point[rank].time)
            waited = {r: self._waited(r, point, last, clocks) for r in point if r != last}
            self._lead[last] = 0.0
            cost[last] += statistics.fmean(waited.values())
            for rank, seconds in waited.items():
                waits[rank][point[rank].part] += seconds
        some = next(iter(ranks.values()))
        return ComparedStep(
            step=some.step,
            seconds=statistics.median(one.seconds for one in ranks.values()),
            cost={rank: seconds for rank, seconds in cost.items() if seconds > 0},
            times={rank: _times(one, waits[rank]) for rank, one in ranks.items()},
            measured=bool(points),
        )

    def _waited(
        self, rank: int, point: Mapping[int, CollectiveCallTime], last: int, clocks: Mapping[int, Clock]
    ) -> float:
        own, end = point[rank], point[last].time
        lead = end - own.time
        tolerance = _TOLERANCE + clocks.get(rank, Clock()).error + clocks.get(last, Clock()).error
        did_wait = end <= own.until + tolerance
        waited = max(0.0, lead - self._lead.get(rank, 0.0))
        self._lead[rank] = 0.0 if did_wait else lead
        return waited


def _points(
    ranks: Mapping[int, RankStep], clocks: Mapping[int, Clock]
) -> list[dict[int, CollectiveCallTime]]:
    """Return the collectives that several ranks have called, each with their arrivals by rank 0's clock."""
    points: dict[tuple[str, int], dict[int, CollectiveCallTime]] = defaultdict(dict)
    for rank, one in ranks.items():
        offset = clocks.get(rank, Clock()).offset
        for call in one.calls:
            moved = call._replace(time=call.time + offset, until=call.until + offset)
            points[call.group, call.number][rank] = moved
    several = [point for point in points.values() if len(point) > 1]
    return sorted(several, key=lambda point: max(call.time for call in point.values()))


def _times(one: RankStep, waits: list[float]) -> RankTimes:
    rest = one.seconds - one.data - one.callbacks
    parts = [
        max(0.0, spent - waited) for spent, waited in zip((one.data, rest, one.callbacks), waits, strict=True)
    ]
    return RankTimes(parts[0], parts[1], parts[2], sum(waits))


# -- The decision: which rank the others wait for, if any, from sums over many steps --

Kind = Literal["always", "at times"]
_Number = TypeVar("_Number", int, float)

# A rank that costs the others most of its time in at least this share of the steps is slow always; one already called
# so stays that down to the second.
_ALWAYS, _STILL_ALWAYS = 0.5, 0.4
# How far a rank's loss must stand above what chance gives [standard deviations]: it takes three slow steps; one
# is not enough, and ranks that are late in turn are not either.
_CERTAIN = 1.7
# Who is named stays named down to this share of both limits, so that a value near a limit prints no lines.
_STILL_NAMED = 0.6


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Sums over steps; the tuples are by rank."""

    steps: int  # how many, each with arrivals that were measured
    seconds: float  # length of the steps [s]
    lost: tuple[float, ...]  # how long the others waited for the rank, on average over them [s]
    squares: tuple[float, ...]  # of that, step by step [s^2]
    last: tuple[int, ...]  # number of steps in which the rank was the last
    # By how much the parts of a rank (PARTS) took longer than others', times what the step lost [s^2].
    excess: tuple[tuple[float, ...], ...]

    @classmethod
    def none(cls, world_size: int) -> Losses:
        """Return the sum over no steps."""
        zeros = (0.0,) * world_size
        nothing = ((0.0,) * len(PARTS),) * world_size
        return cls(steps=0, seconds=0.0, lost=zeros, squares=zeros, last=(0,) * world_size, excess=nothing)

    def __add__(self, other: Losses) -> Losses:
        return Losses(
            steps=self.steps + other.steps,
            seconds=self.seconds + other.seconds,
            lost=_sums(self.lost, other.lost),
            squares=_sums(self.squares, other.squares),
            last=_sums(self.last, other.last),
            excess=tuple(_sums(mine, theirs) for mine, theirs in zip(self.excess, other.excess, strict=True)),
        )

    @property
    def share(self) -> float:
        """The share of the time that was spent waiting, for any rank."""
        return sum(self.lost) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which rank the others wait for."""

    rank: int | None = None  # None: nobody; then all else is zero
    kind: Kind | None = None  # whether it is slow in most steps or in some
    where: Part | None = None  # the part of its step that is longer than that of the others
    lost: float = 0.0  # how long the others wait for it in a step, on average over all [s]
    share: float = 0.0  # the same, of the step time
    step_seconds: float = 0.0  # mean length of a step
    slow_steps: int = 0  # as many equal ones, about, would give the same loss with the same spread
    steps: int = 0  # out of how many


NOBODY = Verdict()


def losses_of(steps: Sequence[ComparedStep], world_size: int) -> Losses:
    """Sum up consecutive steps, each with a collective whose arrivals are known."""
    before = {one.step: previous for previous, one in itertools.pairwise(steps)}
    lost, squares, last = [0.0] * world_size, [0.0] * world_size, [0] * world_size
    excess = [[0.0] * len(PARTS) for _ in range(world_size)]
    for step in steps:
        for rank, seconds in step.cost.items():
            lost[rank] += seconds
            squares[rank] += seconds**2
            # What a rank does after the last collective of a step makes it late for the next one.
            for one in filter(None, (before.get(step.step), step)):
                _add_excess(excess[rank], one, rank, weight=seconds)
        if step.last is not None:
            last[step.last] += 1
    return Losses(
        steps=len(steps),
        seconds=sum(step.seconds for step in steps),
        lost=tuple(lost),
        squares=tuple(squares),
        last=tuple(last),
        excess=tuple(map(tuple, excess)),
    )


def decide(losses: Losses, *, min_share: float, before: Verdict = NOBODY) -> Verdict:
    """Decide whom the others wait for."""
    # A rank is named if waiting for it costs at least ``min_share`` of the time more than waiting for each of
    # the others does on average (where all are late in turn, nobody is slow), and if that is no accident. A
    # value near a limit leaves the verdict as it was ``before``.
    world_size = len(losses.lost)
    if losses.seconds <= 0 or world_size < 2 or not any(losses.lost):
        return NOBODY
    rank = max(range(world_size), key=losses.lost.__getitem__)
    lost = losses.lost[rank]
    more = lost - (sum(losses.lost) - lost) / (world_size - 1)
    needed = _STILL_NAMED if before.rank == rank else 1.0
    by_chance = math.sqrt(sum(losses.squares))
    if more < needed * min_share * losses.seconds or more < needed * _CERTAIN * by_chance:
        return NOBODY
    slow_steps = min(lost**2 / losses.squares[rank], float(losses.steps))
    limit = _STILL_ALWAYS if (before.rank, before.kind) == (rank, "always") else _ALWAYS
    excess = losses.excess[rank]
    return Verdict(
        rank=rank,
        kind="always" if slow_steps >= limit * losses.steps else "at times",
        where=PARTS[max(range(len(PARTS)), key=excess.__getitem__)],
        lost=lost / losses.steps,
        share=lost / losses.seconds,
        step_seconds=losses.seconds / losses.steps,
        slow_steps=round(slow_steps),
        steps=losses.steps,
    )


def _add_excess(sums: list[float], step: ComparedStep, rank: int, *, weight: float) -> None:
    own = step.times.get(rank)
    others = [times for other, times in step.times.items() if other != rank]
    if own is None or not others:
        return
    for i in range(len(PARTS)):
        sums[i] += weight * (own[i] - statistics.median(times[i] for times in others))


def _sums(mine: Sequence[_Number], theirs: Sequence[_Number]) -> tuple[_Number, ...]:
    return tuple(a + b for a, b in zip(mine, theirs, strict=True))
