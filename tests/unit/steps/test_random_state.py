"""Random states are taken exactly, whoever drew in between."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_lockstep.steps.snapshot import RandomState

DRAWS = {
    "torch": lambda: torch.rand(3),
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(2),
    "numpy normal": np.random.randn,
    "numpy seed": lambda: np.random.seed(3),
}


def drawn() -> list[float]:
    return [
        float(torch.rand(())), random.random(), random.gauss(0, 1), float(np.random.randn()), float(np.random.rand()),
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_states():
    before = RandomState.capture()
    yield
    before.restore()


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_state_taken_after_any_draw_gives_the_same_numbers(name, times):
    RandomState.capture()  # what was known before must not be taken for what is now
    for _ in range(times):
        DRAWS[name]()
        state = RandomState.capture(torch.device("cpu"))
        numbers = drawn()
        state.restore()
        assert drawn() == numbers
        state.restore()


def test_the_number_left_over_of_a_pair_of_normals():
    np.random.seed(1)
    states = []
    for _ in range(4):
        states.append(RandomState.capture())
        np.random.randn()
    for state in reversed(states):
        state.restore()
        assert RandomState.capture().numpy["has_gauss"] == state.numpy["has_gauss"]


def test_another_global_generator_of_numpy():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        state = RandomState.capture()
        numbers = np.random.rand(3).tolist()
        state.restore()
        assert np.random.rand(3).tolist() == numbers
    finally:
        np.random.set_bit_generator(before)
