"""Augmentation by sample: what a data set draws for a sample depends on seed, epoch and position alone."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset

from lightning_lockstep.loaders.global_order import PlacedBatch, SeededBatches, seeded_by_sample
from lightning_lockstep.steps.sample_numbers import BatchPlace

ORDER = [7, 3, 3, *range(9, 20), 0, 1, 2]  # one sample twice
BATCH = 4


class Images(Dataset[Any]):
    """Draws from all three global generators."""

    kind = "images"

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        drawn = [index, random.random(), numpy.random.rand(), float(torch.rand(()))]
        return torch.tensor([*drawn, random.random()], dtype=torch.float64)


class Batched(Images):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class OwnGenerator(Images):
    def __init__(self) -> None:
        self.numbers = numpy.random.default_rng()

    def seed_sample(self, seed: int) -> None:
        self.numbers = numpy.random.default_rng(seed)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, self.numbers.random()], dtype=torch.float64)


class Places(Sampler[Any]):
    """Gives a rank its part of each global batch, or one index after the other."""

    def __init__(self, epoch: int, rank: int, ranks: int, batched: bool = True) -> None:
        self._given = epoch, rank, ranks, batched

    def __iter__(self) -> Iterator[PlacedBatch]:
        epoch, rank, ranks, batched = self._given
        for number, start in enumerate(range(0, len(ORDER), BATCH if batched else ranks)):
            stop = min(start + (BATCH if batched else ranks), len(ORDER))
            part = ORDER[start + rank : stop : ranks]
            place = BatchPlace(epoch, number, start + rank, ranks, len(part))
            yield PlacedBatch(part or ORDER[start : start + 1], place)


def collated(samples: list[Tensor]) -> tuple[Tensor, float]:
    assert type(samples) is list
    return torch.stack(samples), random.random() + numpy.random.rand() + float(torch.rand(()))


def epoch_of(dataset: Dataset[Any], *, ranks: int = 1, epoch: int = 0, seed: int = 1) -> tuple[Any, Any]:
    """Return the samples by their positions, and what was drawn for each batch."""
    found: dict[int, list[float]] = {}
    of_batches: dict[int, set[float]] = {}
    for rank in range(ranks):
        loader = DataLoader(dataset, batch_sampler=Places(epoch, rank, ranks), collate_fn=collated)
        for number, (samples, drawn) in enumerate(seeded_by_sample(loader, seed)):
            positions = range(number * BATCH + rank, min(number * BATCH + BATCH, len(ORDER)), ranks)
            found.update(zip(positions, samples.tolist(), strict=False))
            of_batches.setdefault(number, set()).add(drawn)
    return dict(sorted(found.items())), of_batches


WRAPPED = {
    "plain": Images(),
    "__getitems__": Batched(),
    "Subset(ConcatDataset)": Subset(ConcatDataset([Images(), Images()]), range(20)),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_samples_and_batches_are_the_same_on_any_number_of_ranks(name: str, ranks: int) -> None:
    assert epoch_of(WRAPPED[name], ranks=ranks) == epoch_of(Images())


def test_positions_epochs_and_seeds_have_numbers_of_their_own() -> None:
    samples, batches = epoch_of(Images())
    others = [epoch_of(Images(), epoch=1), epoch_of(Images(), seed=2)]
    drawn = [tuple(one[1:]) for found, _ in [(samples, batches), *others] for one in found.values()]
    assert samples[1][0] == samples[2][0]  # the same sample
    assert len(set(drawn)) == 3 * len(ORDER)
    assert all(len(one) == 1 for one in batches.values()) and len(set.union(*batches.values())) == len(batches)


def test_a_loader_without_batches() -> None:
    loader = DataLoader(Images(), batch_size=None, sampler=Places(0, 1, 2, batched=False))
    given = [sample.tolist() for sample in seeded_by_sample(loader, 1)]
    assert given[:8] == [epoch_of(Images())[0][position] for position in range(1, 16, 2)]


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: Subset(ConcatDataset([Images(), one]), range(20, 40))])
def test_a_data_set_with_a_generator_of_its_own_is_given_a_seed(wrap: Any) -> None:
    once, again = (epoch_of(wrap(OwnGenerator()), ranks=ranks)[0] for ranks in (1, 3))
    assert once == again and len({one[1] for one in once.values()}) == len(ORDER)


def test_attributes_are_those_of_the_data_set_within() -> None:
    inside = Images()
    wrapped: Any = pickle.loads(pickle.dumps(SeededBatches(inside, list, 1)))
    assert (len(wrapped), wrapped.kind) == (20, "images") and wrapped[3][0] == 3
    wrapped = SeededBatches(inside, list, 1)
    wrapped.kind = "others"
    assert inside.kind == "others" and not hasattr(wrapped, "seed_sample")


def test_generators_are_as_they_were() -> None:
    before = random.getstate(), str(numpy.random.get_state())
    torch.manual_seed(5)
    epoch_of(Images())
    drawn = torch.rand(())
    assert (random.getstate(), str(numpy.random.get_state())) == before
    # A loader draws a seed for its workers, with or without any.
    torch.manual_seed(5)
    list(DataLoader([0]))
    assert torch.rand(()) == drawn
