"""Micro-batch x accumulation x ranks = the global batch that was asked for, or the nearest there is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_lockstep._text import counted

__all__ = ["EffectiveBatch", "LearningRateScaling", "plan_effective_batch", "scaled_learning_rate"]

LearningRateScaling = Literal["linear", "sqrt"]


@dataclass(frozen=True)
class EffectiveBatch:
    """How a global batch is divided."""

    requested: int  # samples of all ranks in one optimizer step
    micro_batch: int  # samples per rank
    accumulate: int  # micro-batches per optimizer step
    ranks: int

    @property
    def total(self) -> int:
        """Samples of all ranks in one optimizer step."""
        return self.micro_batch * self.accumulate * self.ranks

    @property
    def exact(self) -> bool:
        """Whether that is what was asked for."""
        return self.total == self.requested

    def __str__(self) -> str:
        ranks = counted(self.ranks, "rank")
        return f"{self.micro_batch} per rank x {self.accumulate} accumulated x {ranks} = {self.total}"


def plan_effective_batch(requested: int, *, ranks: int, largest: int) -> EffectiveBatch:
    """Divide a global batch of ``requested`` samples so that a micro-batch has ``largest`` at most.

    An exact division is taken unless it needs more than twice the micro-batches that the memory asks for
    (a prime number of samples would be trained one by one); then the nearest total is taken.
    """
    share = max(1, requested // ranks)
    least = math.ceil(share / largest)
    if requested % ranks == 0:
        for accumulate in range(least, 2 * least + 1):
            if share % accumulate == 0:
                return EffectiveBatch(requested, share // accumulate, accumulate, ranks)
    candidates = [
        EffectiveBatch(requested, micro, accumulate, ranks)
        for accumulate in range(least, 2 * least + 1)
        for micro in (requested // (accumulate * ranks), math.ceil(requested / (accumulate * ranks)))
        if 1 <= micro <= largest
    ]
    candidates = candidates or [EffectiveBatch(requested, min(share, largest), least, ranks)]
    return min(candidates, key=lambda plan: (abs(plan.total - requested), plan.accumulate, plan.total))


def scaled_learning_rate(
    learning_rate: float, *, total: int, reference: int, scaling: LearningRateScaling | None
) -> float:
    """Return the learning rate for a global batch of ``total`` samples, chosen for one of ``reference``.

    ``linear`` follows Goyal et al. 2017 (SGD, https://arxiv.org/abs/1706.02677), ``sqrt`` is the rule for
    adaptive optimizers (Malladi et al. 2022, https://arxiv.org/abs/2205.10287).
    """
    ratio = total / reference
    factor = {None: 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scaling]
    return learning_rate * factor
