"""The search for the largest batch size that fits: numbers in, a frozen proposal out, no Trainer in sight.

A search is asked what to try (:meth:`SizeSearch.propose`) and given the outcome (:meth:`SizeSearch.record`).
Ranks that are given the same outcomes propose the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Trial:
    """One size that was tried."""

    size: int
    fits: bool  # on every rank
    peak: float | None = None  # the most of any rank [bytes]; None: could not be read
    limit: float | None = None  # the least of any rank [bytes]; None: could not be read


@dataclass(frozen=True)
class Proposal:
    """What to do next."""

    stop: bool
    size: int  # to try next; at the end the largest that was run and fitted, 0 when none did
    reason: str


class SizeSearch(ABC):
    """Base of the three searches."""

    mode = ""

    def __init__(
        self, init_val: int = 2, *, max_val: int = 8192, max_trials: int = 25, tolerance: float = 0.02
    ) -> None:
        self.init_val, self.max_val = min(init_val, max_val), max_val
        # The search ends when the size found is within this share (tolerance) of the first that cannot fit.
        self.max_trials, self.tolerance = max_trials, tolerance
        self.low = 0  # largest that fitted; 0: none has
        self.high: int | None = None  # smallest that did not fit; None: all have
        self.trials: list[Trial] = []

    def propose(self) -> Proposal:
        """Return what to try next, or the answer."""
        if not self.trials:
            return Proposal(False, self.init_val, "first size")
        if self.low >= self.max_val:
            return Proposal(True, self.low, f"the largest size allowed, {self.max_val}, fits")
        if self.high is not None and self.high <= 1:
            return Proposal(True, 0, "1 does not fit")
        if self.high is not None and self.low and self.low >= (1 - self.tolerance) * (self.high - 1):
            return Proposal(True, self.low, f"{self.high} does not fit")
        if len(self.trials) >= self.max_trials:
            return Proposal(True, self.low, f"max_trials={self.max_trials} reached")
        return self._next()

    def record(self, size: int, fits: bool, *, peak: float | None = None, limit: float | None = None) -> None:
        self.trials.append(Trial(size, fits, peak, limit))
        if fits:
            self.low = max(self.low, size)
        else:
            self.high = size if self.high is None else min(self.high, size)
        if self.high is not None and self.low >= self.high:
            # Memory in use elsewhere changed between two trials: what failed last counts.
            self.low = max((t.size for t in self.trials if t.fits and t.size < self.high), default=0)

    def state_dict(self) -> dict[str, Any]:
        """Return what is known so far as plain values."""
        return {"mode": self.mode, "trials": [asdict(trial) for trial in self.trials]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.low, self.high, self.trials = 0, None, []
        for trial in state["trials"]:
            self.record(trial["size"], trial["fits"], peak=trial["peak"], limit=trial["limit"])

    @abstractmethod
    def _next(self) -> Proposal:
        """Return the next size; some trial was made, and no end is reached."""

    def _try(self, size: float, reason: str) -> Proposal:
        """Propose ``size``, kept between what fitted and what did not, and never twice."""
        upper = self.max_val if self.high is None else min(self.max_val, self.high - 1)
        size = min(max(int(size), self.low + 1), upper)
        return Proposal(False, size, reason)

    def _halfway(self) -> Proposal:
        assert self.high is not None
        middle = math.sqrt(max(self.low, 1) * self.high)
        return self._try(middle, f"between {self.low}, which fits, and {self.high}, which does not")


class PowerSearch(SizeSearch):
    """Doubles the size until it does not fit; the answer is the last that did."""

    mode = "power"

    def _next(self) -> Proposal:
        if self.high is None:
            return self._try(2 * self.low, f"{self.low} fits")
        if self.low:
            return Proposal(True, self.low, f"{self.high} does not fit")
        return self._try(self.high // 2, f"{self.high} does not fit")


class BinarySearch(SizeSearch):
    """Grows eightfold until a size does not fit, then halves the ratio between the two."""

    # Growing fast and dividing by ratio needs about half the trials of doubling and dividing by difference
    # for the same relative precision.

    mode = "binsearch"
    growth = 8

    def _next(self) -> Proposal:
        if self.high is None:
            return self._try(self.growth * self.low, f"{self.low} fits")
        if not self.low:
            return self._try(self.high // self.growth, f"{self.high} does not fit")
        return self._halfway()


class ModelSearch(BinarySearch):
    """Fits peak memory = a + b x size to small trials, and confirms the size at which that reaches the limit.

    Until two peaks differ by more than ``noise`` it grows, and where memory cannot be read it is a
    :class:`BinarySearch`.
    """

    mode = "model"
    # Aim this share below the prediction: a trial that fits says more than one that does not.
    caution = 0.99
    # A straight line is not trusted further than this beyond the largest size that was run.
    reach = 64

    def __init__(
        self,
        init_val: int = 2,
        *,
        max_val: int = 8192,
        max_trials: int = 25,
        tolerance: float = 0.02,
        noise: float = 0.0,
    ) -> None:
        super().__init__(init_val, max_val=max_val, max_trials=max_trials, tolerance=tolerance)
        self.noise = noise  # [bytes]

    def predicted(self) -> float | None:
        """Return the size at which the line through the peaks reaches the limit, or ``None`` without a line."""
        line = self.line()
        limit = next((t.limit for t in reversed(self.trials) if t.limit is not None), None)
        if line is None or limit is None:
            return None
        a, b = line
        return (limit - a) / b

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

    def _next(self) -> Proposal:
        predicted = self.predicted()
        if predicted is None or not self.low:
            return self._without_line()
        if self.high is not None and predicted >= self.high:
            # The line promised a size that failed: trust what was seen.
            return self._below_failure(self.high)
        goal = min(predicted, self.max_val, self.reach * self.low)
        if self.low >= (1 - self.tolerance) * min(predicted, self.max_val):
            return Proposal(True, self.low, f"memory is full at about {predicted:.0f}")
        aim = goal if goal == self.max_val else goal * self.caution
        return self._try(aim, f"memory is predicted to be full at about {predicted:.0f}")

    def _without_line(self) -> Proposal:
        if self.high is None:
            return self._try((4 if len(self.trials) < 2 else self.growth) * self.low, f"{self.low} fits")
        return super()._next()

    def _below_failure(self, high: int) -> Proposal:
        reason = f"{high} does not fit, though predicted to"
        failures = sum(1 for trial in self.trials if not trial.fits)
        if self.low < 0.75 * high and failures <= 2:
            return self._try(0.95 * high, reason)
        return self._halfway()


def search_for(
    mode: str, *, init_val: int, max_val: int, max_trials: int, noise: float | None = None
) -> SizeSearch:
    """Return the search of that name; without ``noise`` memory cannot be read, and ``model`` is blind."""
    if mode == "model" and noise is not None:
        return ModelSearch(init_val, max_val=max_val, max_trials=max_trials, noise=noise)
    kind = PowerSearch if mode == "power" else BinarySearch
    return kind(init_val, max_val=max_val, max_trials=max_trials)
