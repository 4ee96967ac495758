"""Checksums of tensors: every bit and every position counts, and nothing else does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lightning_lockstep.replicas.checksums import Checksums

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
# Below and above what is summed together with others, whole words and not, more than one piece.
SIZES = [1, 2, 3, 7, 1000, 1023, 1024, 1025, 4097, 70_000, 70_001, 300_003]


def numbers(*tensors: Tensor) -> list[int]:
    return [*Checksums({str(n): tensor for n, tensor in enumerate(tensors)}).numbers().values()]


def some(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (size,), generator=generator, dtype=torch.uint8).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(0, 100, (size,), generator=generator).to(dtype)


def flipped(tensor: Tensor, position: int, bit: int) -> Tensor:
    """The tensor with one bit of its bytes changed."""
    other = tensor.clone()
    other.view(-1).view(torch.uint8)[position] ^= 1 << bit
    return other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype: torch.dtype, device: str) -> None:
    draw = random.Random(1)
    for size in SIZES:
        tensor = some(size, dtype).to(device)
        length = tensor.numel() * tensor.element_size()
        (own,) = numbers(tensor)
        assert numbers(tensor.clone()) == [own]
        bits = 1 if dtype is torch.bool else 8
        for position in {0, length - 1, *(draw.randrange(length) for _ in range(5))}:
            other = flipped(tensor, position, draw.randrange(bits))
            assert numbers(other) != [own], (size, position)


@pytest.mark.parametrize("size", SIZES)
def test_positions_count(size: int) -> None:
    if size > 2:
        tensor = torch.arange(size).float()
        (own,) = numbers(tensor)
        assert numbers(tensor.flip(0)) != [own]
        assert numbers(tensor.roll(1)) != [own]
        # Pieces that change places.
        assert size < 140_000 or numbers(tensor.roll(65_536)) != [own]


def test_minus_zero_is_not_zero_in_an_even_number_of_values() -> None:
    """The highest bit of a word stays where it is in a product, where two of them would cancel."""
    for size in (64, 4096):
        zeros = torch.zeros(size)
        seen = {numbers(zeros)[0]}
        for pair in ([1, 3], [1, 5], [3, 5], [0, 1], [0, 2]):
            other = zeros.clone()
            other[pair] = -0.0
            seen.add(numbers(other)[0])
        assert len(seen) == 6


def test_a_nan_equals_itself() -> None:
    assert numbers(torch.full((5000,), float("nan"))) == numbers(torch.full((5000,), float("nan")))


def test_only_the_values_count_and_not_where_they_lie() -> None:
    tensor = some(5000, torch.float32)
    for offset in (1, 2, 3):  # a gradient in a bucket
        bucket = torch.zeros(6000)
        bucket[offset : offset + 5000] = tensor
        assert numbers(bucket[offset : offset + 5000]) == numbers(tensor)
    assert numbers(tensor.view(50, 100)) == numbers(tensor)
    strided = torch.zeros(5000, 2)
    strided[:, 0] = tensor
    assert numbers(strided[:, 0]) == numbers(tensor)
    assert numbers(torch.nn.Parameter(tensor)) == numbers(tensor)


def test_of_many_tensors_each_has_its_own_number() -> None:
    tensors = [some(size, dtype, seed) for seed, size in enumerate([*SIZES, 0]) for dtype in DTYPES]
    together = numbers(*tensors)
    for index in range(0, len(tensors), 7):
        if not tensors[index].numel():
            continue
        changed = list(tensors)
        changed[index] = flipped(tensors[index], 0, 0)
        other = numbers(*changed)
        assert [i for i, (a, b) in enumerate(zip(together, other, strict=True)) if a != b] == [index]


def test_no_tensors_and_channels_last() -> None:
    assert numbers() == []
    images = some(2 * 3 * 50 * 50, torch.float32).view(2, 3, 50, 50).to(memory_format=torch.channels_last)
    own = numbers(images)
    images[1, 2, 3, 4] += 1
    assert numbers(images) != own
