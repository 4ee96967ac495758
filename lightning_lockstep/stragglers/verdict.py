"""The decision: which rank the others wait for, if any, from sums over many steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_lockstep.stragglers.comparison import ComparedStep
from lightning_lockstep.stragglers.step_times import PARTS, Part

__all__ = ["NOBODY", "Kind", "Losses", "Verdict", "decide", "losses_of"]

Kind = Literal["always", "at times"]

# Late in at least this share of the steps is "always"; a rank already called so stays that down to the second.
_ALWAYS, _STILL_ALWAYS = 0.6, 0.4
# Late in fewer steps than this is an accident.
_FEWEST_LATE = 3
# Who is named stays named down to this share of the limit, so that a value near the limit prints no lines.
_STILL_NAMED = 0.6


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Sums over steps; the tuples are by rank.

    Attributes:
        steps: Number of steps in which arrivals were measured.
        seconds: Their length [s].
        lost: How long the others waited for the rank, on average over them [s].
        last: Number of steps in which the rank was the last.
        late: Number of steps in which waiting for the rank mattered.
        excess: By how much the rank's parts were longer than those of the others in these steps [s], in the order
            of :data:`PARTS`.
    """

    steps: int
    seconds: float
    lost: tuple[float, ...]
    last: tuple[int, ...]
    late: tuple[int, ...]
    excess: tuple[tuple[float, ...], ...]

    @classmethod
    def none(cls, world_size: int) -> Losses:
        """Return the sum over no steps."""
        zeros = (0,) * world_size
        return cls(
            steps=0, seconds=0.0, lost=(0.0,) * world_size, last=zeros, late=zeros, excess=((0.0,) * len(PARTS),) * world_size
        )

    def __add__(self, other: Losses) -> Losses:
        return Losses(
            steps=self.steps + other.steps,
            seconds=self.seconds + other.seconds,
            lost=tuple(a + b for a, b in zip(self.lost, other.lost, strict=True)),
            last=tuple(a + b for a, b in zip(self.last, other.last, strict=True)),
            late=tuple(a + b for a, b in zip(self.late, other.late, strict=True)),
            excess=tuple(
                tuple(a + b for a, b in zip(mine, theirs, strict=True))
                for mine, theirs in zip(self.excess, other.excess, strict=True)
            ),
        )

    @property
    def share(self) -> float:
        """The share of the time that was spent waiting, whoever for."""
        return sum(self.lost) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which rank the others wait for.

    Attributes:
        rank: The rank, or ``None`` for nobody; then all else is zero.
        kind: Whether it is late in most steps or in some.
        where: The part of its step that is longer than that of the others.
        lost: How long the others wait for it in a step, on average over all steps [s].
        share: The same as a share of the step time.
        step_seconds: Mean length of a step [s].
        late_steps: In how many steps waiting for it mattered.
        steps: Out of how many.
    """

    rank: int | None = None
    kind: Kind | None = None
    where: Part | None = None
    lost: float = 0.0
    share: float = 0.0
    step_seconds: float = 0.0
    late_steps: int = 0
    steps: int = 0

    def is_like(self, other: Verdict) -> bool:
        """Return whether both name the same rank as slow in the same way, whatever the figures."""
        return (self.rank, self.kind) == (other.rank, other.kind)


NOBODY = Verdict()


def losses_of(steps: Sequence[ComparedStep], world_size: int, *, min_share: float) -> Losses:
    """Sum up consecutive steps.

    Args:
        steps: In order; those without arrivals are left out.
        world_size: Number of ranks.
        min_share: A rank is late where the others wait for it for this share of an ordinary step or longer.
    """
    measured = [step for step in steps if step.measured]
    if not measured:
        return Losses.none(world_size)
    # Of the lower half: where a rank is slow in most steps, an ordinary step is still one of those.
    matters = min_share * statistics.median_low(step.seconds for step in measured)
    before = dict(zip((step.step for step in steps[1:]), steps, strict=False))
    lost, last, late = [0.0] * world_size, [0] * world_size, [0] * world_size
    excess = [[0.0] * len(PARTS) for _ in range(world_size)]
    for step in measured:
        for rank, seconds in step.cost.items():
            lost[rank] += seconds
            if seconds >= matters:
                late[rank] += 1
                # What a rank does after the last collective of a step makes it late for the next one.
                for one in filter(None, (before.get(step.step), step)):
                    _add_excess(excess[rank], one, rank)
        if step.last is not None:
            last[step.last] += 1
    return Losses(
        steps=len(measured),
        seconds=sum(step.seconds for step in measured),
        lost=tuple(lost),
        last=tuple(last),
        late=tuple(late),
        excess=tuple(map(tuple, excess)),
    )


def _add_excess(sums: list[float], step: ComparedStep, rank: int) -> None:
    own = step.times.get(rank)
    others = [times for other, times in step.times.items() if other != rank]
    if own is None or not others:
        return
    for i, part in enumerate(PARTS):
        sums[i] += own.of(part) - statistics.median(times.of(part) for times in others)


def decide(losses: Losses, *, min_share: float, before: Verdict = NOBODY) -> Verdict:
    """Decide whom the others wait for.

    A rank is named if waiting for it costs at least ``min_share`` of the time more than waiting for each of the others
    does on average (where all are late in turn, nobody is slow), and if it was late more often than by accident.

    Args:
        losses: Sums over enough steps.
        min_share: From which share of the time on a rank is named.
        before: The verdict so far, which a value near a limit does not change.
    """
    world_size = len(losses.lost)
    if losses.seconds <= 0 or world_size < 2:
        return NOBODY
    rank = max(range(world_size), key=losses.lost.__getitem__)
    lost, late = losses.lost[rank], losses.late[rank]
    others = (sum(losses.lost) - lost) / (world_size - 1)
    limit = min_share * (_STILL_NAMED if before.rank == rank else 1.0)
    if (lost - others) / losses.seconds < limit or late < _FEWEST_LATE:
        return NOBODY
    always = late / losses.steps >= (_STILL_ALWAYS if before.kind == "always" and before.rank == rank else _ALWAYS)
    excess = losses.excess[rank]
    return Verdict(
        rank=rank,
        kind="always" if always else "at times",
        where=PARTS[max(range(len(PARTS)), key=excess.__getitem__)],
        lost=lost / losses.steps,
        share=lost / losses.seconds,
        step_seconds=losses.seconds / losses.steps,
        late_steps=late,
        steps=losses.steps,
    )
