"""Each stage of ZeRO has the weights of one process; the other strategies, divisions and resumes: random programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_lockstep import LockstepDDPStrategy, LockstepDeepSpeedStrategy
from lightning_lockstep.errors import ConfigurationError
from tests.harness import run_ranks
from tests.models.loaders.same_numbers import difference, fitted

FLOAT32: dict[str, Any] = {"dtype": torch.float32}


def by_zero(stage: int) -> dict[str, Any]:
    def fit(samples: int, accumulate: int, **options: Any) -> Any:
        return fitted(LockstepDeepSpeedStrategy(stage=stage), samples, accumulate, **FLOAT32, **options)

    with pytest.raises(ConfigurationError, match="num_items with accumulate_grad_batches=2 under DeepSpeed"):
        fit(101, 2, counts=True)
    return {
        "samples": fit(97, 1),
        "accumulated": fit(101, 2),
        "tokens": fit(97, 1, counts=True),
    }


def alone() -> dict[str, Any]:
    return {
        "samples": fitted(LockstepDDPStrategy(), 97, 1, **FLOAT32),
        "accumulated": fitted(LockstepDDPStrategy(), 101, 2, **FLOAT32),
        "tokens": fitted(LockstepDDPStrategy(), 97, 1, counts=True, **FLOAT32),
    }


def test_each_stage_has_the_weights_of_one_process() -> None:
    (expected,) = run_ranks(1, alone, backend=None, timeout=100)
    for stage in (1, 2, 3):
        found = run_ranks(2, by_zero, stage, backend=None, timeout=200)[0]
        assert found.keys() == expected.keys()
        for case, (steps, weights) in found.items():
            assert steps == expected[case][0]
            assert difference(weights, expected[case][1]) < 1e-5, (stage, case)
