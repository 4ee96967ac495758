"""The same global batches on any number of ranks."""

from __future__ import annotations

import itertools

import pytest

from lightning_lockstep.demo.data import GlobalBatchPartition, GlobalBatchSampler, batch_size_per_rank
from lightning_lockstep.errors import ConfigurationError


def global_batches(
    samples: int, batch_size: int, world_size: int, accumulate: int, epoch: int
) -> list[set[int]]:
    """The samples of all ranks in each optimizer step."""
    partition = GlobalBatchPartition(
        samples=samples, batch_size=batch_size, world_size=world_size, accumulate=accumulate
    )
    ranks = []
    for rank in range(world_size):
        sampler = GlobalBatchSampler(range(samples), partition=partition, rank=rank, shuffle=True, seed=7)
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        assert len(sampler) == len(ranks[-1])
    share = batch_size * accumulate
    return [
        set(itertools.chain.from_iterable(rank[step * share : (step + 1) * share] for rank in ranks))
        for step in range(partition.steps)
    ]


@pytest.mark.parametrize("epoch", [0, 3])
def test_one_global_batch_holds_the_same_samples_for_every_division(epoch: int) -> None:
    expected = global_batches(100, 24, 1, 1, epoch)
    assert len(expected) == 4
    assert all(len(batch) == 24 for batch in expected)
    for world_size, accumulate in [(2, 1), (4, 1), (1, 3), (2, 2), (3, 4)]:
        batch_size = batch_size_per_rank(24, world_size, accumulate)
        assert global_batches(100, batch_size, world_size, accumulate, epoch) == expected


def test_another_epoch_and_another_seed_give_another_order() -> None:
    assert global_batches(100, 10, 2, 1, 0) != global_batches(100, 10, 2, 1, 1)
    partition = GlobalBatchPartition(samples=50, batch_size=5)
    one, other = (
        list(GlobalBatchSampler(range(50), partition=partition, rank=0, shuffle=True, seed=seed))
        for seed in (1, 2)
    )
    assert one != other
    assert set(one) == set(other)


@pytest.mark.parametrize("samples", [1, 7, 31, 32, 33, 64, 65, 225, 297])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_evaluation_sees_every_sample_once_in_equally_many_batches(samples: int, world_size: int) -> None:
    partition = GlobalBatchPartition(samples=samples, batch_size=16, world_size=world_size)
    shards = [
        list(GlobalBatchSampler(range(samples), partition=partition, rank=r, shuffle=False))
        for r in range(world_size)
    ]
    assert sorted(itertools.chain.from_iterable(shards)) == list(range(samples))
    if samples >= world_size:
        assert len({-(-len(shard) // partition.eval_batch_size) for shard in shards}) == 1
        assert (
            partition.batch_size
            <= partition.eval_batch_size
            <= max(partition.batch_size, samples // world_size + 1)
        )


@pytest.mark.parametrize(
    ("size", "parts", "near"),
    [(33, (2, 1), "32 or 34"), (1, (2, 1), "2"), (10, (2, 3), "6 or 12"), (0, (1, 1), "1")],
)
def test_a_global_batch_that_does_not_divide_names_the_nearest(
    size: int, parts: tuple[int, int], near: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"the nearest that does is {near}$"):
        batch_size_per_rank(size, *parts)
