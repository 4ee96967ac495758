"""Global random generators, seeded by whole numbers that a hash makes of others, and left as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
#: Of SplitMix64: https://prng.di.unimi.it/splitmix64.c
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(*parts: int) -> int:
    """Return a hash of whole numbers, of 64 bits."""
    z = 0x9E3779B97F4A7C15
    for part in parts:
        z = ((z ^ (part & _MASK)) * FACTORS[0]) & _MASK
        z ^= z >> 29
        z = (z * FACTORS[1]) & _MASK
        z ^= z >> 32
    return z


def seed_generators(key: int) -> None:
    """Seed the global generators of torch (on the CPU), Python and numpy, within :func:`kept_generators`."""
    torch.default_generator.manual_seed(key)  # 1 us; `torch.manual_seed` takes 150
    random.seed(key)
    numpy.random.seed(key & 0xFFFFFFFF)


def exchange_generators(torch_state: Tensor, python_state: Any, numpy_bits: Any) -> tuple[Tensor, Any, Any]:
    """Give the global generators of torch (on the CPU), Python and numpy these states, and return those they had."""
    # numpy's whole bit generator is exchanged, because copying its state is slow. Only the second of a pair of normal
    # numbers, which numpy keeps elsewhere, is lost.
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    numpy.random.set_bit_generator(numpy_bits)  # type: ignore[attr-defined]
    return before


_bits = numpy.random.MT19937(0)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the global generators of torch (on the CPU), Python and numpy after the body."""
    is_within = numpy.random.get_bit_generator() is _bits  # type: ignore[attr-defined]
    bits = numpy.random.MT19937(0) if is_within else _bits
    before = exchange_generators(torch.get_rng_state(), random.getstate(), bits)
    try:
        yield
    finally:
        exchange_generators(*before)


@contextmanager
def torch_seeded(key: int) -> Iterator[None]:
    """Let torch draw the same numbers on all ranks in the body, on this rank's GPU too, and restore its generators."""
    devices = [] if gpu_state() is None else [torch.cuda.current_device()]
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(key)
        if devices:
            torch.cuda.manual_seed(key)
        yield


def gpu_state() -> Any:
    """Return the state of this rank's generator on its GPU, which is on the host; ``None`` without a GPU in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # `is_available` asks the driver each time
        return None
    return torch.cuda.get_rng_state()
