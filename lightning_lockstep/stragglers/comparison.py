"""One step of all ranks side by side: who arrived last, and how long the others waited for it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from lightning_lockstep.stragglers.step_times import PARTS, CollectiveCallTime, Part, RankStep

__all__ = ["Clock", "ComparedStep", "RankTimes", "StepComparer", "joined"]

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

    def of(self, part: Part) -> float:
        return self[PARTS.index(part)]


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
    """Compares steps, which it must be given in order.

    A rank that goes on before the last one has arrived did not wait in that call. It is still ahead at the next, so
    only what was added to its lead counts there; where a rank did wait, it has no lead any more.
    """

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
