"""Each optimizer step is the mean over its samples, or its tokens, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_lockstep import LockstepDDPStrategy
from tests.common.loaders.same_numbers import difference, fitted
from tests.helpers import run_ranks

#: The fit of each: samples, micro-batches of an optimizer step, and what else.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "97 samples": (97, 1, {}),
    "101 samples, accumulated": (101, 2, {}),
    "103 samples, accumulated": (103, 4, {}),
    "tokens": (97, 1, {"counts": True}),
    "tokens, accumulated": (101, 2, {"counts": True}),
    "tokens, clipped": (101, 2, {"counts": True, "gradient_clip_val": 0.1}),
    "a sampler that draws": (97, 1, {"sampler": True}),
    "manual optimization": (96, 1, {"manual": True}),
    "float32": (97, 1, {"dtype": torch.float32}),
    "float32, tokens": (97, 2, {"dtype": torch.float32, "counts": True}),
}


def fits() -> dict[str, Any]:
    return {
        name: fitted(LockstepDDPStrategy(), count, accumulate, **options)
        for name, (count, accumulate, options) in CASES.items()
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The fits on one rank without accumulation."""
    return run_ranks(1, fits, backend=None, timeout=120)[0]


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, fits, backend=None, timeout=120)


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_one_process(case: str, several: Any, alone: Any) -> None:
    if case == "manual optimization" and len(several) == 3:
        pytest.skip("a global batch of 16 divides by 2 only")
    steps, weights = alone[case]
    for rank in several:
        assert rank[case][0] == steps
        assert difference(rank[case][1], weights) < (1e-5 if "float32" in case else 1e-12)
