"""One order of samples for all ranks: each epoch is cut into global batches, and each of those divided among the ranks.

Lightning gives a loader a sampler that draws the order by seed and epoch, and repeats samples until all ranks have
equally many. Here that sampler gives the whole order. Rank ``r`` gets ``batch[r::ranks]`` of each global batch, so that
a step sees the same samples on any number of ranks, and the parts differ by one sample at most. Every rank has the same
number of batches. A rank without a sample in a global batch gets a padding sample, which must not count.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

from lightning_lockstep._lightning import _IndexBatchSamplerWrapper, isolate_rng
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import loader_with


@dataclass(frozen=True)
class Division:
    """How the samples of an epoch are cut into global micro-batches."""

    samples: int  # of the epoch
    sizes: tuple[int, ...]  # of the micro-batches of an optimizer step, counting all ranks
    drop_last: bool = False  # leaves out the samples at the end that do not fill an optimizer step
    least: int = 1  # if fewer samples than this are left at the end, the last micro-batch takes them too

    def bounds(self) -> NDArray[Any]:
        """Return where in the order each micro-batch begins, and where the last one ends."""
        steps, rest = divmod(self.samples, sum(self.sizes))
        if self.drop_last or (steps and rest < self.least):
            rest = 0
        last = micro_batches(rest, -(-rest // max(self.sizes)))  # of a last optimizer step with fewer samples
        found = numpy.concatenate([[0], numpy.tile(self.sizes, steps), last]).astype(numpy.int64).cumsum()
        if not self.drop_last:
            found[-1] = self.samples
        return found


def micro_batches(size: int, count: int) -> tuple[int, ...]:
    """Divide a global batch into so many micro-batches, whose sizes differ by one sample at most."""
    return tuple(size // count + (number < size % count) for number in range(count))


class GlobalBatches(Sampler[Any]):
    """A batch sampler that gives a rank its part of each global batch."""

    def __init__(
        self,
        inner: Any,  # the batch sampler that Lightning has made; None: the loader makes no batches
        sampler: Any,  # gives the whole order
        division: Division | None,  # None: `inner` makes batches of its own, which are divided as they are
        rank: int,
        ranks: int,
    ) -> None:
        self.sampler, self._inner, self._division = sampler, inner, division
        self._rank, self._ranks = rank, ranks
        self.batch_size = None if division is None else -(-max(division.sizes) // ranks)
        self.drop_last = bool(getattr(inner, "drop_last", False))
        self._sizes: list[tuple[int, int]] = []
        self._whole = None if division is None else division.bounds()
        self._resumed: tuple[int, Any] = (-1, None)  # the epoch that is resumed, and its bounds

    def __len__(self) -> int:
        """Return the number of batches of every rank."""
        if self._whole is not None:
            return len(self._whole) - 1
        whole, rest = divmod(len(self._inner), self._ranks)
        return whole + bool(rest and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch next."""
        self.sampler.set_epoch(epoch)

    def sizes(self, number: int) -> tuple[int, int]:
        """Return how many samples of batch ``number`` of the epoch are this rank's, and all ranks'."""
        if self._whole is None:
            return self._sizes[number]
        start, stop = self._bounds[number : number + 2].tolist()
        return len(range(start + self._rank, stop, self._ranks)), stop - start

    @property
    def _bounds(self) -> Any:
        epoch, bounds = self._resumed
        return bounds if epoch == self.sampler.epoch else self._whole

    def samples_before(self, number: int) -> int | None:
        """Return how many samples come before a batch of the epoch; ``None`` if ``inner`` makes the batches."""
        return None if self._whole is None else int(self._bounds[number])

    def go_on_at(self, sample: int, epoch: int) -> int:
        """Resume an epoch of which ``sample`` samples were seen, and return the number of its next batch."""
        assert self._division is not None and self._whole is not None
        rest = replace(self._division, samples=self._division.samples - sample).bounds()
        batch = len(self._whole) - len(rest)
        self._resumed = epoch, numpy.concatenate([self._whole[:batch], rest + sample])
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches; each one in which it has no sample has a single padding sample."""
        if self._whole is None:
            yield from self._of_batches()
            return
        order = self._drawn(self.sampler)
        for start, stop in pairwise(self._bounds.tolist()):
            part = order[start + self._rank : stop : self._ranks] or order[start : start + 1]
            yield part if self._inner is not None else part[0]

    def _of_batches(self) -> Iterator[Any]:
        """Yield this rank's of the batches, which the ranks take in turn; those left at the end are cut by samples."""
        batches, ranks = self._drawn(self._inner), self._ranks
        whole = len(batches) // ranks * ranks
        rest = [] if self.drop_last else [sample for batch in batches[whole:] for sample in batch]
        groups = [batches[i : i + ranks] for i in range(0, whole, ranks)]
        groups += [[rest[rank::ranks] for rank in range(ranks)]] if rest else []
        self._sizes = [(len(group[self._rank]), sum(map(len, group))) for group in groups]
        for group in groups:
            yield list(group[self._rank]) or list(group[0][:1])

    def _drawn(self, source: Any) -> list[Any]:
        """Return all that a sampler gives in an epoch, with global random numbers that are the same on all ranks."""
        seed = (self.sampler.seed + self.sampler.epoch) % 2**32
        with isolate_rng(include_cuda=False):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            return list(source)


class _Replicas(int):
    """The number of ranks that Lightning gives its samplers, by which they are recognized."""

    def __gt__(self, other: object) -> bool:
        # If it is above 1, Lightning advises to test on one device, because its sampler repeats samples.
        return False


def marked(sampler_kwargs: Mapping[str, int], *, predicts: bool) -> dict[str, int]:
    """Return arguments for Lightning's samplers, by which these can be told from samplers of the user."""
    # Lightning's sampler for predictions refuses fewer samples than ranks.
    ranks, rank = (1, 0) if predicts else (sampler_kwargs["num_replicas"], sampler_kwargs["rank"])
    return {**sampler_kwargs, "num_replicas": _Replicas(ranks), "rank": rank}


def divided(
    loader: Any, *, rank: int, ranks: int, trains: bool, micro_batches: Sequence[int] | None = None
) -> Any:
    """Return a loader that gives this rank its part, if Lightning has given it a sampler; else the loader itself."""
    # `micro_batches`: samples of all ranks in each micro-batch of an optimizer step; None: what the loader says.
    batches: Any = getattr(loader, "batch_sampler", None)
    predicts = type(batches) is _IndexBatchSamplerWrapper
    inner = _asked_sampler(batches)
    sampler: Any = getattr(inner, "sampler", None) if inner is not None else getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader) or type(getattr(sampler, "num_replicas", None)) is not _Replicas:
        return loader
    samples = len(sampler.dataset)
    sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size = 1, 0, samples, samples
    own = None
    if inner is None or type(inner) is BatchSampler:
        size = ranks if inner is None else inner.batch_size * ranks
        drops = inner is not None and inner.drop_last
        own = Division(samples, tuple(micro_batches or (size,)), drops, 1 if trains else ranks)
    parts = GlobalBatches(inner, sampler, own, rank, ranks)
    name = "sampler" if inner is None else "batch_sampler"
    return loader_with(loader, **{name: _IndexBatchSamplerWrapper(parts) if predicts else parts})


def in_global_order(loader: Any, seed: int) -> Any:
    """Return a loader of a single process that gives its samples in the order that several ranks would have."""
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(getattr(loader, "sampler", None), RandomSampler) or type(batches) is not BatchSampler:
        return loader
    sampler: Any = DistributedSampler(loader.dataset, num_replicas=1, rank=0, seed=seed)
    own = Division(len(loader.dataset), (batches.batch_size,), batches.drop_last)
    return loader_with(loader, sampler=sampler, batch_sampler=GlobalBatches(batches, sampler, own, 0, 1))


def parts_of(loader: Any) -> Any:
    """Return the sampler whose ``sizes`` tells the sizes of a loader's batches; ``None`` if there is none."""
    batches = getattr(loader, "batch_sampler", None)
    for one in (batches, _asked_sampler(batches), getattr(loader, "sampler", None)):
        if callable(getattr(one, "sizes", None)):
            return one
    return None


def samples_in(loader: Any) -> int:
    """Return how many samples a divided loader has on all ranks together."""
    sampler = parts_of(loader).sampler
    return len(sampler.dataset)


def check_samples(counts: Sequence[int | None]) -> None:
    """Raise unless a loader has the same number of samples on all ranks; ``counts`` has that of each."""
    if len(set(counts)) > 1:
        told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        raise ConfigurationError(
            f"The ranks have loaders of different numbers of samples ({told}): expected the same data set on all ranks,"
            " which is divided among them. If each rank has its own part, set Trainer(use_distributed_sampler=False)."
        )


def _asked_sampler(batches: Any) -> Any:
    """Return the batch sampler that Lightning's for predictions asks; any other one itself."""
    return batches._batch_sampler if type(batches) is _IndexBatchSamplerWrapper else batches
