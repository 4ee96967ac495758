"""The search for the largest batch size that fits: numbers in, a frozen proposal out, no Trainer in sight.

A search is asked what to try (:meth:`SizeSearch.propose`) and given the outcome (:meth:`SizeSearch.record`).
Ranks that are given the same outcomes propose the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trial:
    """How a trial of one size went, the same on every rank."""

    size: int
    fits: bool  # on every rank
    peak: float | None = None  # the most of any rank [bytes]; None: could not be read
    limit: float | None = None  # the least of any rank [bytes]; None: could not be read
    reasons: Mapping[int, str] = field(default_factory=dict)  # what ran out, by rank


@dataclass(frozen=True)
class Proposal:
    """What to do next."""

    stop: bool
    size: int  # to try next; at the end the largest that was run and fitted, 0 when none did
    reason: str


class SizeSearch:
    """One search; the modes differ in what comes after a trial."""

    # ``power`` doubles the size until it does not fit; the answer is the last that did. ``binsearch`` grows eightfold
    # until a size does not fit, then halves the ratio between the two: about half the trials of doubling and dividing
    # by difference for the same relative precision. ``model`` fits peak memory = a + b x size to small trials, and
    # confirms the size at which that reaches the limit; until two peaks differ by more than ``noise`` it grows, and
    # where memory cannot be read (no ``noise``) it is a ``binsearch``.

    # Aim this share below the prediction: a trial that fits says more than one that does not.
    caution = 0.99
    # A straight line is not trusted further than this beyond the largest size that was run.
    reach = 64

    def __init__(
        self,
        mode: str,
        init_val: int = 2,
        *,
        max_val: int = 8192,
        why_none_above: str = "max_val",  # what makes ``max_val`` the largest
        max_trials: int = 25,
        tolerance: float = 0.02,
        noise: float | None = None,  # peaks that differ by less say nothing [bytes]
    ) -> None:
        self.mode = "binsearch" if mode == "model" and noise is None else mode
        self.init_val, self.max_val, self.noise = min(init_val, max_val), max_val, noise or 0.0
        self.why_none_above = why_none_above
        # The search ends when the size found is within this share (tolerance) of the first that cannot fit.
        self.max_trials, self.tolerance = max_trials, tolerance
        self.low = 0  # largest that fitted; 0: none has
        self.high: int | None = None  # smallest that did not fit; None: all have
        self.trials: list[Trial] = []

    def propose(self) -> Proposal:
        """Return what to try next, or the answer."""
        low, high = self.low, self.high
        if not self.trials:
            return Proposal(False, self.init_val, "first size")
        if low >= self.max_val:
            return Proposal(True, low, f"{low} fits and nothing larger is tried: {self.why_none_above}")
        if high is not None and high <= 1:
            return Proposal(True, 0, "1 does not fit")
        if high is not None and low and low >= (1 - self.tolerance) * (high - 1):
            return Proposal(True, low, f"{high} does not fit")
        if len(self.trials) >= self.max_trials:
            return Proposal(True, low, f"max_trials={self.max_trials} reached")
        predicted = self._predicted() if self.mode == "model" and low else None
        if predicted is not None:
            return self._by_prediction(predicted)
        growth = 2 if self.mode == "power" else 8
        if high is None:
            if self.mode == "model" and len(self.trials) < 2:
                growth = 4
            return self._try(growth * low, f"{low} fits")
        if not low:
            return self._try(high // growth, f"{high} does not fit")
        if self.mode == "power":
            return Proposal(True, low, f"{high} does not fit")
        return self._halfway(high)

    def record(self, trial: Trial) -> None:
        self.trials.append(trial)
        if trial.fits:
            self.low = max(self.low, trial.size)
        else:
            self.high = trial.size if self.high is None else min(self.high, trial.size)
        if self.high is not None and self.low >= self.high:
            # Memory in use elsewhere changed between two trials: what failed last counts.
            self.low = max((t.size for t in self.trials if t.fits and t.size < self.high), default=0)

    def line(self) -> tuple[float, float] | None:
        """Return (a, b) of peak = a + b x size through the two largest peaks that differ [bytes]."""
        # The first trial also pays for what is made once (libraries' buffers, threads): it is no point of a line.
        warm = self.trials[1:]
        read = sorted({t.size: t.peak for t in warm if t.fits and t.peak is not None}.items())
        if len(read) < 2:
            return None
        size, peak = read[-1]
        for other, lower in reversed(read[:-1]):
            # Close to the goal two sizes are too near each other for a slope: go back to one well below.
            if peak - lower > self.noise and other <= 0.75 * size:
                b = (peak - lower) / (size - other)
                return peak - b * size, b
        return None

    def _predicted(self) -> float | None:
        """Return the size at which the line through the peaks reaches the limit, or ``None`` without a line."""
        line = self.line()
        limit = next((t.limit for t in reversed(self.trials) if t.limit is not None), None)
        return None if line is None or limit is None else (limit - line[0]) / line[1]

    def _by_prediction(self, predicted: float) -> Proposal:
        low, high = self.low, self.high
        if high is not None and predicted >= high:
            # The line promised a size that failed: trust what was seen.
            failures = sum(1 for trial in self.trials if not trial.fits)
            if low < 0.75 * high and failures <= 2:
                return self._try(0.95 * high, f"{high} does not fit, though predicted to")
            return self._halfway(high)
        if low >= (1 - self.tolerance) * min(predicted, self.max_val):
            return Proposal(True, low, f"memory is full at about {predicted:.0f}")
        goal = min(predicted, self.max_val, self.reach * low)
        aim = goal if goal == self.max_val else goal * self.caution
        return self._try(aim, f"memory is predicted to be full at about {predicted:.0f}")

    def _halfway(self, high: int) -> Proposal:
        middle = math.sqrt(max(self.low, 1) * high)
        return self._try(middle, f"between {self.low}, which fits, and {high}, which does not")

    def _try(self, size: float, reason: str) -> Proposal:
        """Propose ``size``, kept between what fitted and what did not, and never twice."""
        upper = self.max_val if self.high is None else min(self.max_val, self.high - 1)
        return Proposal(False, min(max(int(size), self.low + 1), upper), reason)
