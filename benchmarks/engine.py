"""Measure variants in interleaved rounds and compare each with a named peer.

A machine drifts: it warms up, another program starts. So the variants take turns within every round, in an
order that rotates, and what counts is the ratio *within* a round; its spread over the rounds tells how far
to trust it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: One measurement of a variant; returns what was measured (seconds, bytes, ...).
Measure = Callable[[], float]
Samples = dict[str, list[float]]
MIDDLE_HALF = "middle half"
_FOR_QUARTILES = 4  # rounds


def interleave(
    variants: Mapping[str, Measure],  # name to the function that takes one measurement
    *,
    rounds: int,  # number of rounds that count
    warmup: int = 0,  # rounds before those, thrown away
    progress: Callable[[str], None] | None = None,  # called with a line before each measurement
) -> Samples:
    """Measure every variant once a round, each round starting with the next one."""
    samples: Samples = {name: [] for name in variants}
    names = list(variants)
    for round_number in range(-warmup, rounds):
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            if progress is not None:
                progress(f"round {round_number + 1}/{rounds}: {name}")
            value = variants[name]()
            if round_number >= 0:
                samples[name].append(value)
    return samples


@dataclass(frozen=True)
class Spread:
    """The middle of some numbers, and the middle half of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median and quartiles; with fewer than four values, the whole range instead of quartiles."""
        if not values:
            raise ValueError("no values to summarise")
        if len(values) < _FOR_QUARTILES:
            return cls(statistics.median(values), min(values), max(values))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)


@dataclass(frozen=True)
class Comparison:
    """One table: every variant beside its peer."""

    title: str  # what was measured, with what sizes
    samples: Samples  # what :func:`interleave` returned
    peer: str  # the variant that the others are compared with
    unit: str = "ms"  # unit of the values shown
    scale: float = 1000.0  # factor from the measured values to that unit (1000 for seconds shown as ms)
    # the goal for variants other than the peer, by name: the ratio, or the difference in ``unit``
    at_most: Mapping[str, float] = field(default_factory=dict)
    # whether the goal is a ratio to the peer or a difference from it
    by: Literal["ratio", "difference"] = "ratio"

    def __post_init__(self) -> None:
        unknown = {self.peer, *self.at_most} - set(self.samples)
        if unknown:
            raise ValueError(f"{sorted(unknown)} not among the variants {sorted(self.samples)}")
        if len({len(values) for values in self.samples.values()}) != 1:
            raise ValueError("the variants have different numbers of samples: paired rounds are needed")

    def against_peer(self, name: str) -> Spread:
        """Paired ratios (or differences, in ``unit``) of a variant and its peer, summarised."""
        pairs = zip(self.samples[name], self.samples[self.peer], strict=True)
        if self.by == "ratio":
            return Spread.of([mine / other for mine, other in pairs])
        return Spread.of([(mine - other) * self.scale for mine, other in pairs])

    def header(self) -> list[str]:
        """Column names."""
        what = "ratio to" if self.by == "ratio" else f"{self.unit} more than"
        return ["variant", f"median [{self.unit}]", f"{what} {self.peer}", self.spread, "goal", "verdict"]

    @property
    def spread(self) -> str:
        """What is shown of the rounds beside their median: the quartiles, or of a few the lowest and the highest."""
        rounds = len(self.samples[self.peer])
        return MIDDLE_HALF if rounds >= _FOR_QUARTILES else "one round" if rounds == 1 else f"range of {rounds}"

    def rows(self) -> list[list[str]]:
        """One row a variant."""
        return [self._row(name) for name in self.samples]

    def _row(self, name: str) -> list[str]:
        median = Spread.of(self.samples[name]).median * self.scale
        if name == self.peer:
            return [name, f"{median:.3f}", "1" if self.by == "ratio" else "0", "", "", ""]
        spread = self.against_peer(name)
        middle_half = f"{spread.low:.3f} to {spread.high:.3f}"
        return [name, f"{median:.3f}", f"{spread.median:.3f}", middle_half, *self._verdict(name, spread)]

    def _verdict(self, name: str, spread: Spread) -> tuple[str, str]:
        if name not in self.at_most:
            return "", ""
        goal = self.at_most[name]
        if spread.median <= goal:
            verdict = "reached"
        # Where the middle half of the rounds straddles the goal, noise decides which side the median is on.
        elif spread.low <= goal:
            verdict = "reached within noise"
        else:
            verdict = "missed"
        return f"<= {goal:g}", verdict


@dataclass(frozen=True)
class Table:
    """A table of a topic's own making."""

    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]

    def header(self) -> list[str]:
        """Column names."""
        return list(self.columns)

    def rows(self) -> list[list[str]]:
        """The cells."""
        return [list(row) for row in self.cells]


@dataclass(frozen=True)
class Report:
    """What a topic's ``run`` returns."""

    title: str
    tables: Sequence[Comparison | Table]
    notes: Sequence[str] = ()
