"""A run that outlives its ranks: the state of the most advanced one reaches the others whole."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from lightning_lockstep.distributed import current_communicator, shut_down
from lightning_lockstep.strategies.outliving.state import broadcast_state
from tests.harness import run_ranks


def state() -> dict[str, Any]:
    weights = torch.arange(12, dtype=torch.float64).view(3, 4)
    return {
        "weights": OrderedDict(weight=weights.T, half=weights.to(torch.bfloat16), empty=torch.empty(0, 2)),
        "optimizer": [{"step": torch.tensor(7.0), "betas": (0.9, 0.99), "seen": torch.tensor([True, False])}],
        "random": (torch.get_rng_state()[:5], ["of Python", 1]),
        "rows": {(3, frozenset({"loss"})): {"loss": 1.0}},
    }


def give() -> Any:
    torch.manual_seed(3)
    mine = state() if current_communicator().rank == 1 else None
    found = broadcast_state(1, mine)
    shut_down()
    return found


def test_a_state_reaches_the_others_whole() -> None:
    torch.manual_seed(3)
    expected = state()
    for found in run_ranks(2, give):
        assert found.keys() == expected.keys() and type(found["weights"]) is OrderedDict
        for name, value in expected["weights"].items():
            assert found["weights"][name].dtype == value.dtype
            torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=0)
        assert str(found["optimizer"]) == str(expected["optimizer"])
        assert torch.equal(found["random"][0], expected["random"][0])
        assert (found["random"][1], found["rows"]) == (expected["random"][1], expected["rows"])
