"""What kind a loader is, how its epoch is cut into global batches, and who gets what of each.

Other loaders, what is dropped, and epochs that are resumed on other ranks: random programs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lightning_lockstep._lightning import _set_sampler_epoch
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.loaders.global_order import (
    Share,
    check_the_same,
    divided,
    micro_batches,
    parts_of,
)
from lightning_lockstep.steps.snapshot import seed_generators

DATA = TensorDataset(torch.arange(24))


def test_a_global_batch_is_cut_into_nearly_equal_parts() -> None:
    assert micro_batches(16, 3) == (6, 5, 5) and micro_batches(8, 2) == (4, 4)


# -- Loaders as programs make them --


class Own(Sampler[int]):
    """An order that a program has in mind, drawn from every global generator."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(24).tolist()
        random.shuffle(order)
        numpy.random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 24


class Growing(BatchSampler):
    """Batches of one, two, three and more samples, without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        order, size = list(self.sampler), 1
        while order:
            yield order[:size]
            order, size = order[size:], size + 1

    def __len__(self) -> int:
        raise TypeError("not known")


LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "shuffled": lambda size: DataLoader(DATA, size, shuffle=True),
    "with a generator": lambda size: DataLoader(DATA, size, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "own sampler": lambda size: DataLoader(DATA, size, sampler=Own()),
    "fewer": lambda size: DataLoader(DATA, size, sampler=RandomSampler(DATA, num_samples=7)),
    "more": lambda size: DataLoader(DATA, size, sampler=RandomSampler(DATA, num_samples=50)),
    "own batches": lambda size: DataLoader(DATA, batch_sampler=Growing(SequentialSampler(DATA), 1, False)),
    "items": lambda size: DataLoader(DATA, None, shuffle=True),
    "items that are batches": lambda size: DataLoader(DATA, None, sampler=BatchSampler(Own(), 5, False)),
}


def global_batches(make: Callable[[int], DataLoader[Any]], ranks: int, size: int = 8) -> list[list[Any]]:
    """Return the units that all ranks together have of each global batch, without padding; check their sizes."""
    made = []
    for rank in range(ranks):
        seed_generators(5)  # all ranks have made their loader with the same random numbers
        made.append(parts_of(divided(make(size // ranks), Share(rank, ranks, True))))
    given = [list(parts) for parts in made]
    assert len({len(one) for one in given}) == 1
    found = []
    for number, units in enumerate(zip(*given, strict=True)):
        sizes = [parts.sizes(number) for parts in made]
        assert sum(own for own, _ in sizes) == sizes[0][1] and len({total for _, total in sizes}) == 1
        own = [unit if isinstance(unit, list) else [unit] for unit in units]
        # A rank without a sample has one that pads.
        kept = [unit if count else [] for unit, (count, _) in zip(own, sizes, strict=True)]
        assert all(len(unit) == count for unit, (count, _) in zip(kept, sizes, strict=True))
        assert all(own)
        found.append(sorted(chain(*kept)))
    return found


@pytest.mark.parametrize("name", ["shuffled", "own sampler", "with a generator", "items"])
def test_each_epoch_has_another_order(name: str) -> None:
    loader = divided(LOADERS[name](4), Share(1, 2, True))
    parts, orders = parts_of(loader), []
    for epoch in (0, 1, 2):
        _set_sampler_epoch(loader, epoch)
        orders.append(str(list(parts)))
    assert len(set(orders)) == 3


def test_one_that_divides_itself_and_one_of_no_known_kind_are_left_alone() -> None:
    own = DistributedSampler(DATA, num_replicas=2, rank=0)  # type: ignore[arg-type]
    inside = DataLoader(DATA, batch_sampler=Growing(own, 1, False))
    for loader in (DataLoader(DATA, 2, sampler=own), inside, [1, 2]):
        assert divided(loader, Share(0, 2, True)) is loader


def test_a_sampler_without_an_end_is_refused() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield 1

    with pytest.raises(ConfigurationError, match=r"Endless has no length and gave more than 3,400,000"):
        divided(DataLoader(TensorDataset(torch.zeros(24_000)), 4, sampler=Endless()), Share(0, 2, True))


def test_of_a_sampler_without_an_end_as_much_is_taken_as_its_length_says() -> None:
    class Counting(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return count()

        def __len__(self) -> int:
            return 10

    parts = parts_of(divided(DataLoader(DATA, 4, sampler=Counting()), Share(1, 2, True)))
    assert list(parts) == [[1, 3, 5, 7], [9]]


def test_a_data_set_that_changes_has_its_own_length_in_each_epoch() -> None:
    class Changing(TensorDataset):
        samples = 12

        def __len__(self) -> int:
            return self.samples

    data = Changing(torch.arange(30))
    loader = divided(DataLoader(data, 3, shuffle=True), Share(0, 2, True))
    found = []
    for epoch, data.samples in enumerate((12, 26, 5)):
        _set_sampler_epoch(loader, epoch)
        found.append((len(list(loader)), len(loader)))
    assert found == [(2, 2), (5, 5), (1, 1)]


def test_an_order_of_a_generator_is_drawn_again_from_its_state() -> None:
    parts = parts_of(divided(LOADERS["with a generator"](8), Share(0, 1, True)))
    list(parts)
    parts.set_epoch(1)
    second, state = list(parts), parts.drawn_from
    again = parts_of(divided(LOADERS["with a generator"](8), Share(0, 1, True, epoch=1)))
    again.go_on_at(8, 1, state, 1)
    assert list(again) == second[1:]


def test_a_resumed_epoch_asks_a_sampler_once() -> None:
    """One that turns its samples by how often it was asked, as a counter of epochs does."""

    class Counts(Own):
        asked = -1

        def __iter__(self) -> Iterator[int]:
            self.asked += 1
            return iter([(number + self.asked) % 24 for number in range(24)])

    parts = parts_of(divided(DataLoader(DATA, 8, sampler=Counts()), Share(0, 1, True)))
    parts.go_on_at(8, 0, [], 1)
    assert list(chain(*parts)) == list(range(8, 24))


def test_ranks_with_other_loaders_are_told_apart() -> None:
    def compared(loader: Any) -> dict[str, Any]:
        return parts_of(divided(loader, Share(0, 2, True))).compared()  # type: ignore[no-any-return]

    plain = compared(DataLoader(DATA, 4))
    check_the_same([plain, compared(DataLoader(DATA, 4))])
    others = {
        r"samples: 24 on rank 0, 7 on rank 1": LOADERS["fewer"](4),
        r"batch_size: 4 on rank 0, 2 on rank 1": DataLoader(DATA, 2),
        r"order of the first epoch: \w+ on rank 0, \w+ on rank 1": LOADERS["shuffled"](4),
        r"indices of the Subset: None on rank 0, \w+ on rank 1": DataLoader(Subset(DATA, range(24)[::-1]), 4),
        r"kind: a DataLoader on rank 0, a batch sampler on rank 1": LOADERS["own batches"](4),
    }
    for told, loader in others.items():
        with pytest.raises(ConfigurationError, match=told):
            check_the_same([plain, compared(loader)])


def test_a_single_process_has_the_order_of_several_ranks() -> None:
    one = divided(DataLoader(DATA, 8, shuffle=True), Share(0, 1, True))
    assert [sorted(batch) for batch in one.batch_sampler] == global_batches(LOADERS["shuffled"], 2)
