"""How a stream is divided: every sample once, the same number of batches on all ranks, sizes that all ranks know."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_lockstep._lightning import _set_sampler_epoch
from lightning_lockstep.loaders.streams import divides_itself, shared_stream
from lightning_lockstep.steps.snapshot import seed_generators


class Stream(IterableDataset[Any]):
    """Numbers in an order that is drawn from all global generators."""

    def __init__(self, samples: int, *, shuffle: bool = False) -> None:
        self.samples, self.shuffle = samples, shuffle

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.samples).tolist() if self.shuffle else [*range(self.samples)]
        if self.shuffle:
            random.shuffle(order)
            numpy.random.shuffle(order)
        yield from order


class Sized(Stream):
    def __len__(self) -> int:
        return self.samples


def shared(loader: Any, rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    return shared_stream(loader, rank, ranks, **options)


CASES = [
    (samples, size, ranks, drops)
    for samples, size, ranks in product((0, 1, 2, 3, 5, 6, 8, 9, 13), (1, 2), (1, 2, 4))
    for drops in (False, True)
]


def test_each_sample_is_used_once_on_any_number_of_ranks() -> None:
    """With real workers: tests/ranks/loaders."""
    for samples, size, ranks, drops in CASES:
        case = f"{samples} samples, batches of {size}, {ranks} ranks, {drops=}"
        given: list[list[list[int]]] = []
        totals: list[list[int]] = []
        for rank in range(ranks):
            loader = shared(DataLoader(Sized(samples), size, drop_last=drops), rank, ranks)
            batches = [batch.tolist() for batch in loader]
            sizes = [loader.batch_sampler.sizes(number) for number in range(len(batches) + 2)]
            totals.append([total for _, total in sizes])
            assert len(loader) == len(batches), case
            own = [batch[:count] if count else [] for batch, (count, _) in zip(batches, sizes, strict=False)]
            # A padding sample stands where a rank has none of its own, and only there.
            assert all(len(b) == max(n, 1) for b, (n, _) in zip(batches, sizes, strict=False)), case
            given.append(own)
        assert len({len(of_rank) for of_rank in given}) == 1, case
        whole = [
            [parts[i % ranks][i // ranks] for i in range(sum(map(len, parts)))] for parts in zip(*given, strict=True)
        ]
        assert totals == [[*map(len, whole), 0, 0]] * ranks, case
        order = [sample for batch in whole for sample in batch]
        kept = samples - samples % (size * ranks) if drops else samples
        assert order == [*range(kept)], case


def states() -> Any:
    return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())


def test_readers_draw_the_same_order_and_leave_the_random_numbers_of_the_rank_alone() -> None:
    orders = []
    for epoch, rank in product((0, 1), range(2)):
        for seed in (1, 2):
            seed_generators(seed)
            list(DataLoader([0]))  # it draws a seed for its workers, with or without any
            expected = states()
            seed_generators(seed)
            loader = shared(DataLoader(Stream(20, shuffle=True), None), rank, 2)
            _set_sampler_epoch(loader, epoch)
            orders.append([*loader])
            assert states() == expected
    first, again, other, _, second, *_ = orders
    assert first == again
    assert sorted(first + other) == [*range(20)]
    assert second != first  # of another epoch


def test_a_data_set_hears_of_the_epoch_in_its_own_ways() -> None:
    class Own(Stream):
        def __init__(self) -> None:
            super().__init__(9)
            self.generator, self.epochs = torch.Generator(), list[int]()

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[int]:
            yield from torch.randperm(9, generator=self.generator).tolist()

    dataset = Own()
    loader = shared(DataLoader(dataset, 3), ahead=lambda: 2)
    orders = []
    for epoch in (0, 0, 5):
        _set_sampler_epoch(loader, epoch)
        orders.append(torch.cat(list(loader)).tolist())
    assert dataset.epochs == [0, 0, 5]
    assert orders[0] == orders[1] != orders[2]


def test_sizes_are_known_before_the_batches_of_an_optimizer_step_are_given() -> None:
    loader = shared(DataLoader(Sized(45), 2), 6, 7, ahead=lambda: 2)
    found = []
    for number, _ in enumerate(loader):
        first = number // 2 * 2
        found.append(tuple(loader.batch_sampler.sizes(i)[1] for i in (first, first + 1)))
    assert found == [(14, 14), (14, 14), (14, 3), (14, 3)]
    assert loader.batch_sampler.sizes(3) == (0, 3)
    assert len(loader) == 4


def test_ready_batches_and_own_collation_stay_what_they_are() -> None:
    ready = shared(DataLoader(Stream(5), None), 1, 2)
    assert list(ready) == [1, 3, 4]  # the last one is padding
    assert [ready.batch_sampler.sizes(number) for number in range(3)] == [(1, 2), (1, 2), (0, 1)]
    assert ready.batch_size is None
    own = shared(DataLoader(Stream(4), 2, collate_fn=lambda samples: {"n": samples}), 1, 2)
    assert list(own) == [{"n": [1, 3]}]
    assert type(own.dataset) is Stream
    assert own.batch_size == 2
    with pytest.raises(TypeError):
        len(own)


def test_a_program_may_use_its_loader_for_something_else() -> None:
    given = DataLoader(Stream(4), 2)
    assert len(list(shared(given, 0, 2))) == 1
    assert [batch.tolist() for batch in given] == [[0, 1], [2, 3]]


def of_module(name: str, kind: Callable[[], Any]) -> Any:
    made = kind()
    (made if callable(made) else type(made)).__module__ = name
    return made


class StreamingDataset(Stream):
    def __init__(self) -> None:
        super().__init__(3)


class Holding(Stream):
    """Reads from something else."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(3)
        vars(self).update(parts)


def split_by_node(urls: Any) -> Any:
    return urls


DIVIDED = {
    "datasets": lambda: Holding(_distributed=SimpleNamespace(rank=0, world_size=2)),
    "Mosaic Streaming": lambda: of_module("streaming.base.dataset", StreamingDataset),
    "data pipe": lambda: IterableWrapper([1, 2]).shuffle().sharding_filter().map(str),
    "webdataset": lambda: Holding(pipeline=["urls", of_module("webdataset.shardlists", lambda: split_by_node)]),
    "within another": lambda: ChainDataset([Stream(2), Holding(source=Holding(_distributed=object()))]),
}
WHOLE = {
    "stream": lambda: Stream(2),
    "datasets": lambda: Holding(_distributed=None),
    "data pipe": lambda: IterableWrapper([1, 2]).shuffle(),
    "itself": lambda: Holding(pipeline=[len, "a", 3]),
}


@pytest.mark.parametrize("kind", DIVIDED)
def test_a_data_set_that_divides_itself_is_left_alone(kind: str) -> None:
    loader: Any = DataLoader(DIVIDED[kind](), 2)
    assert divides_itself(loader.dataset)
    assert shared(loader, 0, 2) is loader


@pytest.mark.parametrize("kind", WHOLE)
def test_one_that_does_not_is_divided(kind: str) -> None:
    dataset: Any = WHOLE[kind]()
    assert not divides_itself(dataset)
    assert len(list(shared(DataLoader(dataset, 1), 0, 2))) > 0


def test_other_loaders_are_left_alone() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(())

    for loader in (DataLoader([1, 2, 3]), Own(Stream(3)), [1, 2], None):
        assert shared(loader, 0, 2) is loader
