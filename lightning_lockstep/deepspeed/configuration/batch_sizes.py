"""The sizes of a batch, as far as the config and the Trainer say them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_lockstep._settings import is_whole

__all__ = ["BatchSizes", "batch_sizes"]


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of a batch; ``None`` for what is not known."""

    whole: int | None  # samples of all ranks for one step of the optimizer
    micro: int | None  # samples of one rank for one backward
    accumulation: int | None  # batches of one rank for one step of the optimizer
    ranks: int | None  # how many

    def deduced(self) -> BatchSizes:
        """Return the batch with what follows from the rest, as DeepSpeed deduces it."""
        micro, accumulation = self.micro, self.accumulation
        if self.whole is not None and self.ranks is not None:
            per_rank = self.whole // self.ranks
            if micro is None:
                micro = per_rank // (accumulation or 1)
            accumulation = accumulation or (per_rank // micro if micro else None)
        return BatchSizes(self.whole, micro or None, accumulation or None, self.ranks)


def batch_sizes(
    config: Mapping[str, Any], *, micro: int | None, accumulation: int | None, ranks: int | None
) -> BatchSizes:
    """Return the sizes that a config says, and for the others those of the Trainer."""

    def size(key: str, otherwise: int | None) -> int | None:
        written = config.get(key)
        return written if is_whole(written) and written > 0 else otherwise

    return BatchSizes(
        whole=size("train_batch_size", None),
        micro=size("train_micro_batch_size_per_gpu", micro),
        accumulation=size("gradient_accumulation_steps", accumulation),
        ranks=ranks,
    )
