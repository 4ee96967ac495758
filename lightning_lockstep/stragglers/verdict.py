"""The decision: which rank the others wait for, if any, from sums over many steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_lockstep.stragglers.comparison import ComparedStep
from lightning_lockstep.stragglers.step_times import PARTS, Part

__all__ = ["NOBODY", "Kind", "Losses", "Verdict", "decide", "losses_of"]

Kind = Literal["always", "at times"]

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
            last=tuple(a + b for a, b in zip(self.last, other.last, strict=True)),
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

    def is_like(self, other: Verdict) -> bool:
        """Return whether both name the same rank as slow in the same way, whatever the figures."""
        return (self.rank, self.kind) == (other.rank, other.kind)


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
    """Decide whom the others wait for.

    A rank is named if waiting for it costs at least ``min_share`` of the time more than waiting for each of
    the others does on average (where all are late in turn, nobody is slow), and if that is no accident. A
    value near a limit leaves the verdict as it was ``before``.
    """
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
    for i, part in enumerate(PARTS):
        sums[i] += weight * (own.of(part) - statistics.median(times.of(part) for times in others))


def _sums(mine: Iterable[float], theirs: Iterable[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(mine, theirs, strict=True))
