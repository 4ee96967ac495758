"""Real engines in float16, whose loss scale comes down until it fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.common.deepspeed.example_configs import HAS_FLOAT16
from tests.common.deepspeed.loss_scale import Run, train_all
from tests.helpers import run_ranks

pytestmark = pytest.mark.skipif(not HAS_FLOAT16, reason="this CPU does not compute in float16")

# Scaled by 2^16 it overflows float16, by 2^13 not: three halvings, and the hysteresis of ZeRO.
TOO_MUCH = 4.0
NAN = float("nan")
ENGINES: dict[str, Run] = {
    **{f"fp16 {stage}": (stage, "fp16", [TOO_MUCH] * 12, {"loss_scale_window": 50}) for stage in (1, 2, 3)},
    "fp16 nan": (2, "fp16", [1e-3] * 12 + [NAN] * 10, {}),
}


@pytest.fixture(scope="module")
def engines() -> dict[str, dict[str, Any]]:
    first, second = run_ranks(2, train_all, ENGINES, timeout=240)
    assert all(first[name]["outcomes"] == second[name]["outcomes"] for name in ENGINES)
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_real_engine_in_float16(engines: dict[str, dict[str, Any]], stage: int) -> None:
    answer = engines[f"fp16 {stage}"]
    outcomes = answer["outcomes"]
    skips = [outcome.skipped for outcome in outcomes]
    scales = [outcome.scale for outcome in outcomes]
    # The scale came down until it fitted, and then the weights changed in every step.
    assert sum(skips) == answer["skipped_steps"] > 1
    assert skips == sorted(skips, reverse=True) and not skips[-1]
    assert scales[0] >= scales[-1] and scales[-1] * TOO_MUCH <= torch.finfo(torch.float16).max
    assert scales[-1] * TOO_MUCH * 2 > torch.finfo(torch.float16).max / 2
    assert answer["changed"] == [not skipped for skipped in skips]
    assert outcomes[-1].floor == 1.0
    assert answer["verdict"] is None


def test_a_real_engine_whose_loss_is_nan(engines: dict[str, dict[str, Any]]) -> None:
    answer = engines["fp16 nan"]
    assert [outcome.skipped for outcome in answer["outcomes"]] == [False] * 12 + [True] * 10
    assert not any(answer["changed"][12:])
    assert "10 optimizer steps in a row were skipped" in answer["verdict"]
