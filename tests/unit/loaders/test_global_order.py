"""How an epoch is cut into global batches, and who gets what of each."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from lightning_lockstep._lightning import _set_sampler_epoch
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.loaders.global_order import (
    Division,
    GlobalBatches,
    check_samples,
    divided,
    in_global_order,
    marked,
    micro_batches,
)


def cut(division: Division) -> list[range]:
    return [range(start, stop) for start, stop in pairwise(division.bounds().tolist())]


@pytest.mark.parametrize("samples", [1, 15, 16, 17, 31, 32, 97])
@pytest.mark.parametrize("sizes", [(16,), (8, 8), (6, 5, 5)])
def test_each_sample_is_in_one_micro_batch_and_steps_are_the_same(
    samples: int, sizes: tuple[int, ...]
) -> None:
    found = cut(Division(samples, sizes))
    assert list(chain(*found)) == list(range(samples))
    steps = [found[i : i + len(sizes)] for i in range(0, len(found), len(sizes))]
    assert [sum(map(len, step)) for step in steps] == [16] * (samples // 16) + [samples % 16] * (
        samples % 16 > 0
    )
    assert max(map(len, found)) <= max(sizes)
    assert sum(map(len, cut(Division(samples, sizes, drop_last=True)))) == samples // 16 * 16


@pytest.mark.parametrize("samples", [1, 2, 5, 13, 37])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_in_evaluation_every_rank_has_a_sample_in_each_batch(samples: int, ranks: int, size: int) -> None:
    found = cut(Division(samples, (size * ranks,), least=ranks))
    assert list(chain(*found)) == list(range(samples))
    if samples >= ranks:
        assert all(ranks <= len(batch) <= size * ranks + ranks - 1 for batch in found)
    else:
        assert len(found) == 1


def parts(loader: Any, ranks: int, **options: Any) -> list[Any]:
    """The loader of each rank, as Lightning would have made it."""
    made = []
    for rank in range(ranks):
        given = marked({"num_replicas": ranks, "rank": rank}, predicts=False)
        sampler = DistributedSampler(loader.dataset, seed=7, **given)
        batches: Any = BatchSampler(sampler, loader.batch_size, loader.drop_last)
        made.append(
            divided(DataLoader(loader.dataset, batch_sampler=batches), rank=rank, ranks=ranks, **options)
        )
    return made


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_have_the_order_of_a_distributed_sampler_and_nothing_twice(ranks: int) -> None:
    data = TensorDataset(torch.arange(37))
    plain = DataLoader(data, 4)
    found = [list(loader.batch_sampler) for loader in parts(plain, ranks, trains=True)]
    sizes = [
        [loader.batch_sampler.sizes(k) for k in range(len(loader))]
        for loader in parts(plain, ranks, trains=True)
    ]
    real = [
        [batch[:own] for batch, (own, _) in zip(*both, strict=True)]
        for both in zip(found, sizes, strict=True)
    ]
    assert sorted(chain(*(chain(*batches) for batches in real))) == list(range(37))
    assert {len(batches) for batches in found} == {-(-37 // (4 * ranks))}
    for number in range(len(found[0])):
        lengths = [len(batches[number]) for batches in real]
        assert max(lengths) - min(lengths) <= 1 and sum(lengths) == sizes[0][number][1]
    theirs = list(DistributedSampler(data, num_replicas=ranks, rank=1, seed=7))  # type: ignore[arg-type]
    ours = list(chain(*real[1]))
    assert ours == theirs[: len(ours)]


def test_batches_of_a_sampler_of_ones_own_are_divided_whole_and_then_by_samples() -> None:
    class Growing(BatchSampler):
        def __iter__(self) -> Any:
            order, size = list(self.sampler), 1
            while order:
                yield order[:size]
                order, size = order[size:], size + 1

        def __len__(self) -> int:
            return 5

    data = TensorDataset(torch.arange(15))
    found = []
    for rank in range(2):
        sampler = DistributedSampler(
            data, shuffle=False, **marked({"num_replicas": 2, "rank": rank}, predicts=False)
        )  # type: ignore[arg-type]
        loader = DataLoader(data, batch_sampler=Growing(sampler, 1, False))
        batches = divided(loader, rank=rank, ranks=2, trains=True).batch_sampler
        found.append((list(batches), [batches.sizes(number) for number in range(3)]))
    assert found[0] == ([[0], [3, 4, 5], [10, 12, 14]], [(1, 3), (3, 7), (3, 5)])
    assert found[1] == ([[1, 2], [6, 7, 8, 9], [11, 13]], [(2, 3), (4, 7), (2, 5)])


def test_a_loader_of_another_sampler_is_left_alone() -> None:
    data = TensorDataset(torch.arange(8))
    own = DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    for loader in (own, DataLoader(data, 2), [1, 2]):
        assert divided(loader, rank=0, ranks=2, trains=True) is loader
    with pytest.raises(ConfigurationError, match=r"rank 0: 8, rank 1: 9.*use_distributed_sampler=False"):
        check_samples([8, 9])


@pytest.mark.parametrize("sample", [0, 32, 36, 97])
def test_an_epoch_goes_on_at_a_sample_in_another_division(sample: int) -> None:
    data = TensorDataset(torch.arange(97))
    (whole,) = parts(DataLoader(data, 12), 1, trains=True)
    order = list(chain(*whole.batch_sampler))
    batches = whole.batch_sampler
    first = batches.go_on_at(sample, 0)
    assert list(chain(*list(batches)[first:])) == order[sample:]
    assert sum(batches.sizes(number)[1] for number in range(first, len(batches))) == 97 - sample
    assert batches.samples_before(first) == sample
    batches.sampler.set_epoch(1)
    assert sorted(chain(*batches)) == list(range(97))


def test_a_loader_without_batches_has_another_order_in_each_epoch() -> None:
    data = TensorDataset(torch.arange(16))
    sampler = DistributedSampler(data, seed=7, **marked({"num_replicas": 2, "rank": 1}, predicts=False))  # type: ignore[arg-type]
    loader = divided(DataLoader(data, None, sampler=sampler), rank=1, ranks=2, trains=True)
    orders = []
    for epoch in (0, 1):
        _set_sampler_epoch(loader, epoch)
        orders.append([int(one) for (one,) in loader])
    assert len(orders[0]) == len(orders[1]) == 8 and orders[0] != orders[1]


def test_a_single_process_has_the_order_of_several_ranks() -> None:
    data = TensorDataset(torch.arange(16))
    one = in_global_order(DataLoader(data, 8, shuffle=True), 7)
    assert isinstance(one.batch_sampler, GlobalBatches) and not isinstance(one.sampler, RandomSampler)
    both = zip(*(loader.batch_sampler for loader in parts(DataLoader(data, 4), 2, trains=True)), strict=True)
    assert [sorted(batch) for batch in one.batch_sampler] == [sorted(chain(*ranks)) for ranks in both]
    plain = DataLoader(data, 8)
    assert in_global_order(plain, 7) is plain


def test_a_global_batch_is_cut_into_nearly_equal_parts() -> None:
    assert micro_batches(16, 3) == (6, 5, 5) and micro_batches(8, 2) == (4, 4)
