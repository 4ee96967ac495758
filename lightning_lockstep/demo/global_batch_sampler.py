"""Who gets which sample: the same global batches on any number of ranks.

Lightning's defaults do not promise that: on one device a `RandomSampler` draws its order from torch's global
generator, on several a `DistributedSampler` draws another one from its own seed, and pads the last batch with
samples that then count twice. `GlobalBatchSampler` draws one global order by seed and epoch whatever the number of
ranks, cuts it into global batches and divides each into equal slices: one optimizer step sees the same
samples on 1, 2 or 8 ranks, with or without accumulation, and an evaluation sees every sample exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass

import torch
from torch.utils.data import DistributedSampler

from lightning_lockstep._text import counted
from lightning_lockstep.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class GlobalBatchPartition:
    """How the samples of one epoch are divided among the ranks."""

    samples: int  # in the data set
    batch_size: int  # samples per rank and micro-batch
    world_size: int = 1  # ranks
    accumulate: int = 1  # micro-batches per optimizer step

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in one optimizer step."""
        return self.batch_size * self.world_size * self.accumulate

    @property
    def steps(self) -> int:
        """Full optimizer steps in one epoch; what fills no global batch waits for another epoch's order."""
        return self.samples // self.global_batch_size

    def train_indices(self, order: list[int], rank: int) -> list[int]:
        """Positions of `rank`, global batch after global batch, from the epoch's global `order`."""
        share = self.global_batch_size // self.world_size
        starts = (step * self.global_batch_size + rank * share for step in range(self.steps))
        return [index for start in starts for index in order[start : start + share]]

    def eval_indices(self, rank: int) -> list[int]:
        """Positions of `rank` when every sample is wanted once: shards differ by one sample at most."""
        return list(range(rank, self.samples, self.world_size))

    @property
    def eval_batch_size(self) -> int:
        """Smallest batch from `batch_size` up that gives every rank the same number of evaluation batches.

        Shards of `n` and `n + 1` samples need the same number of batches unless `n` is a multiple of the
        batch size; one more sample per batch then removes the odd batch that only some ranks would have.
        """
        shard, rest = divmod(self.samples, self.world_size)
        size = self.batch_size
        if rest == 0 or shard == 0:
            return size
        while shard % size == 0:
            size += 1
        return size


class GlobalBatchSampler(DistributedSampler):  # type: ignore[type-arg]
    """A sampler whose global batches are the same on any number of ranks.

    It is a `DistributedSampler`, which shows Lightning that the samples are already divided and must not be
    divided again, and lets Lightning call `set_epoch`.

    Args:
        dataset: The data; only its length is used.
        partition: How the samples are divided.
        rank: This rank.
        shuffle: `True` yields a new global order each epoch, in full batches (training); `False` yields every
            sample once, in the order of the data (evaluation).
        seed: Seed of the global order; the epoch is added to it.

    Ranks:
        Every rank builds its own with the same `partition` and `seed`. Nothing is communicated: each rank draws
        the whole permutation (8 bytes a sample) and keeps its slice.
    """

    def __init__(
        self, dataset: Sized, *, partition: GlobalBatchPartition, rank: int, shuffle: bool, seed: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas=partition.world_size, rank=rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self.partition = partition
        if shuffle:
            self.num_samples = partition.steps * partition.batch_size * partition.accumulate
        else:
            self.num_samples = len(partition.eval_indices(rank))
        self.total_size = partition.samples

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's positions for the epoch set by `set_epoch`."""
        if not self.shuffle:
            return iter(self.partition.eval_indices(self.rank))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.partition.samples, generator=generator).tolist()
        return iter(self.partition.train_indices(order, self.rank))

    def __len__(self) -> int:
        """Samples of this rank in one epoch."""
        return self.num_samples


def batch_size_per_rank(global_batch_size: int, world_size: int, accumulate: int) -> int:
    """Return the samples per rank and micro-batch of a global batch, which has to divide."""
    parts = world_size * accumulate
    if global_batch_size >= parts and global_batch_size % parts == 0:
        return global_batch_size // parts
    below = max(parts, global_batch_size // parts * parts)
    near = f"{below}" if below >= global_batch_size else f"{below} or {below + parts}"
    raise ConfigurationError(
        f"global_batch_size={global_batch_size} does not divide by {counted(world_size, 'rank')} x {accumulate}"
        f" accumulated micro-batches = {parts}; the nearest that does is {near}"
    )
