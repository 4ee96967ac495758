"""The search for the largest batch size that fits, and the division of a global batch: numbers alone, no Trainer.

A search proposes what to try (:meth:`SizeSearch.propose`) and is given the outcome (:meth:`SizeSearch.record`). With
the same outcomes all ranks propose the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_lockstep._text import counted
from lightning_lockstep.loaders.global_order import micro_batches

# -- The largest batch size that fits --


@dataclass(frozen=True)
class Trial:
    """How a trial of one size went, the same on every rank."""

    size: int
    fits: bool  # on every rank
    reasons: Mapping[int, str] = field(default_factory=dict)  # why it does not fit, by rank


@dataclass(frozen=True)
class Proposal:
    stop: bool
    size: int  # to try next; at the end the largest that was run and fitted, 0 if none did
    reason: str


class SizeSearch:
    """Grows eightfold until a size does not fit, then halves the ratio between what fitted and what did not."""

    # This takes about half the trials of doubling and dividing by difference, for the same relative precision.
    growth = 8
    # The search ends when the size found is within this share of the first that cannot fit.
    tolerance = 0.02

    def __init__(
        self,
        init_val: int = 2,
        *,
        max_val: int = 8192,
        why_none_above: str = "max_val",  # what makes ``max_val`` the largest
        max_trials: int = 25,
    ) -> None:
        self.init_val, self.max_val = min(init_val, max_val), max_val
        self.why_none_above, self.max_trials = why_none_above, max_trials
        self.low = 0  # largest that fitted; 0: none has
        self.high: int | None = None  # smallest that did not fit; None: all have
        self.trials: list[Trial] = []

    def propose(self) -> Proposal:
        low, high = self.low, self.high
        if not self.trials:
            return Proposal(False, self.init_val, "first size")
        if low >= self.max_val:
            return Proposal(True, low, f"{low} fits and nothing larger is tried: {self.why_none_above}")
        if high is not None and high <= 1:
            return Proposal(True, 0, "1 does not fit")
        if high is not None and low and low >= (1 - self.tolerance) * (high - 1):
            return Proposal(True, low, f"{low} fits, {high} does not")
        if len(self.trials) >= self.max_trials:
            return Proposal(True, low, f"max_trials={self.max_trials} reached")
        if high is None:
            return self._try(self.growth * low, f"{low} fits")
        if not low:
            return self._try(high // self.growth, f"{high} does not fit")
        return self._try(math.sqrt(low * high), f"between {low}, which fits, and {high}, which does not")

    def record(self, trial: Trial) -> None:
        self.trials.append(trial)
        if trial.fits:
            self.low = max(self.low, trial.size)
        else:
            self.high = trial.size if self.high is None else min(self.high, trial.size)
        if self.high is not None and self.low >= self.high:
            # Another program's memory has changed between two trials, so the last failure counts.
            self.low = max((t.size for t in self.trials if t.fits and t.size < self.high), default=0)

    def _try(self, size: float, reason: str) -> Proposal:
        """Propose ``size``, kept between what fitted and what did not, and never twice."""
        upper = self.max_val if self.high is None else min(self.max_val, self.high - 1)
        return Proposal(False, min(max(int(size), self.low + 1), upper), reason)


# -- Micro-batch x accumulation x ranks = the global batch that was asked for --


@dataclass(frozen=True)
class EffectiveBatch:
    requested: int  # samples of all ranks in one optimizer step
    sizes: tuple[int, ...]  # samples of all ranks in each of its micro-batches
    ranks: int

    @property
    def micro_batch(self) -> int:
        """Samples per rank in the largest micro-batch."""
        return -(-max(self.sizes) // self.ranks)

    @property
    def accumulate(self) -> int:
        """Micro-batches per optimizer step."""
        return len(self.sizes)

    @property
    def total(self) -> int:
        """Samples of all ranks in one optimizer step."""
        return sum(self.sizes)

    @property
    def exact(self) -> bool:
        """Whether that is what was asked for."""
        return self.total == self.requested

    def __str__(self) -> str:
        least = min(self.sizes) // self.ranks
        each = f"{least} or {self.micro_batch}" if least < self.micro_batch else f"{least}"
        ranks = counted(self.ranks, "rank")
        return f"{each} per rank x {self.accumulate} accumulated x {ranks} = {self.total}"


def plan_effective_batch(requested: int, *, ranks: int, largest: int, any_size: bool) -> EffectiveBatch:
    """Divide a global batch of ``requested`` samples so that a micro-batch has ``largest`` per rank at most."""
    # With `any_size` the micro-batches of ranks may differ by one sample, so that every global batch is possible.
    # Otherwise the nearest total is taken that needs at most twice as many micro-batches as the memory requires: a
    # prime number of samples would be trained one by one.
    if any_size:
        count = -(-requested // (ranks * largest))
        return EffectiveBatch(requested, micro_batches(requested, count), ranks)
    least = math.ceil(max(1, requested // ranks) / largest)
    plans = [
        EffectiveBatch(requested, (micro * ranks,) * accumulate, ranks)
        for accumulate in range(least, 2 * least + 1)
        for micro in (requested // (accumulate * ranks), math.ceil(requested / (accumulate * ranks)))
        if 1 <= micro <= largest
    ]
    return min(plans, key=lambda plan: (abs(plan.total - requested), plan.accumulate, plan.total))
