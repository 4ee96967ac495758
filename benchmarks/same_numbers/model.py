"""What a program learns, from which samples, and in which order its own loaders give them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from benchmarks.same_numbers.program import Program

#: The learning rate, and the largest norm or value of gradients where they are clipped.
RATE, LARGEST = 0.1, 0.05
#: The samples of the second training loader begin here.
SECOND, SAMPLES = 40, 60


def make_model(program: Program) -> nn.Module:
    torch.manual_seed(program.seed)
    if program.real:
        first = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh()
        return nn.Sequential(*first, nn.Dropout(0.3), nn.Linear(4, 1)).double()
    if program.model == "net":
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = nn.Linear(SAMPLES, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


def features(program: Program, number: int) -> Tensor:
    if program.model == "net":
        return torch.tensor([math.sin(number), math.cos(2 * number), number / 20], dtype=torch.float64)
    return nn.functional.one_hot(torch.tensor(number), SAMPLES).double()


def target(number: int) -> float:
    return 1.0 + number / 10


def value(number: int) -> float:
    """What is logged of a sample."""
    return (number * 7) % 5 + number / 8


def items(number: int) -> int:
    """How many items a sample has."""
    return (number + 1) % 4


def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample: ``(batch,)``."""
    return (model(inputs)[:, 0] - targets).square()


def optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    if program.optimizer == "adam":
        return torch.optim.AdamW(model.parameters(), RATE)
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9 if program.optimizer == "momentum" else 0)


def vector(model: nn.Module) -> Tensor:
    """Return all weights and statistics, of a divided model the whole ones."""
    held = [*model.parameters(), *(one for one in model.buffers() if one.is_floating_point())]
    whole = (one.full_tensor() if hasattr(one, "full_tensor") else one for one in held)
    return torch.cat([one.detach().flatten().double() for one in whole])


# -- The orders that are the program's own --


def own_order(order: str, samples: int, epoch: int) -> list[int]:
    """Return what a loader over so many samples gives in an epoch, if nothing is drawn."""
    numbers = list(range(samples))
    if order == "by_length":
        return sorted(numbers, key=lambda number: (number * 7 % 5, number))
    if order == "counter":
        return [(number + epoch) % samples for number in numbers]
    if order == "part":
        return [number for number in numbers if number % 3]
    if order in ("own", "batches", "counted", "lazy"):
        return numbers[::-1] + ([samples // 2] if order == "own" else [])
    return numbers


def own_batches(order: str, samples: int, batch: int, drop_last: bool) -> list[list[int]]:
    """Return the batches of a program's own batch sampler, or the items that are batches."""
    numbers, batches = own_order(order, samples, 0), list[list[int]]()
    while numbers:
        size = len(batches) % (batch + 1) + 1 if order in ("varied", "items") else batch
        batches.append(numbers[:size])
        numbers = numbers[size:]
    return [one for one in batches if not drop_last or len(one) == batch]


class OwnSampler:
    """A sampler of the program's own; it knows how often it was asked, and nothing of epochs."""

    def __init__(self, order: str, samples: int) -> None:
        self.order, self.samples, self.asked = order, samples, 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(own_order(self.order, self.samples, self.asked - 1))

    def __len__(self) -> int:
        return len(own_order(self.order, self.samples, 0))


class Cached(BatchSampler):
    """Makes its batches when it is made."""

    def __init__(self, sampler: OwnSampler, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.made = list(super().__iter__())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


class Counted(Cached):
    """Counts its batches when it is made."""

    def __iter__(self) -> Iterator[list[int]]:
        return BatchSampler.__iter__(self)


class NoLength(BatchSampler):
    """Does not know its length."""

    def __len__(self) -> int:
        raise TypeError("this batch sampler has no length")


class Lazy:
    """Is none of torch's batch samplers."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)
