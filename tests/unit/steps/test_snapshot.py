"""What training steps change is what it was before, in the objects that held it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from lightning_lockstep.steps.snapshot import (
    BufferCopies,
    RandomState,
    random_states,
    restored,
    set_random_states,
    whole_run,
)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
}


def step(module: nn.Module, optimizer: Any) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = (module(torch.randn(8, 4)) - 1).square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.param_groups[0]["more"] = 1


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_as_if_there_had_been_no_trial(name: str, steps_before: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    optimizer, scaler = OPTIMIZERS[name](module.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(steps_before):
        step(module, optimizer)
        scaler.scale(torch.ones(()))
    state = optimizer.state
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict(), scaler.state_dict()))
    with restored(*whole_run(module, [optimizer], scaler=scaler)):
        drawn = torch.rand(3)
        step(module, optimizer)
        scaler.scale(torch.ones(()))
        scaler.update(4.0)
    assert torch.equal(torch.rand(3), drawn)
    after = module.state_dict(), optimizer.state_dict(), scaler.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert optimizer.state is state


def test_sparse_buffers_are_restored() -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("edges", torch.eye(3).to_sparse())
    copies, edges = BufferCopies(module), module.edges
    edges.mul_(2)
    copies.restore()
    assert module.edges is edges and torch.equal(edges.to_dense(), torch.eye(3))


@pytest.mark.parametrize("kind", [numpy.random.MT19937, numpy.random.PCG64, numpy.random.Philox])
def test_numpy_goes_on_with_any_bit_generator(kind: Any) -> None:
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(kind(1))
    try:
        state, plain = RandomState(), random_states()
        assert "array(" not in str(plain[2])
        drawn = numpy.random.rand(3).tolist()
        state.restore()
        assert numpy.random.rand(3).tolist() == drawn
        set_random_states(plain)
        assert numpy.random.rand(3).tolist() == drawn
    finally:
        numpy.random.set_bit_generator(before)
