"""Fits in float16, whose loss scale comes down until it fits."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks
from tests.models.deepspeed.example_configs import HAS_FLOAT16
from tests.ranks.deepspeed.test_loss_scale import NAN, fitted

pytestmark = pytest.mark.skipif(not HAS_FLOAT16, reason="this CPU does not compute in float16")


def fits() -> dict[str, tuple[int, int, str | None, str]]:
    """Of each fit the skipped steps, those in a row at its end, the verdict and what was said."""
    cases = {f"stage {stage}": (stage, {"loss_scale_window": 50}, [16.0] * 12) for stage in (1, 2, 3)}
    cases["nan"] = (2, {}, [1e-3] * 4 + [NAN] * 10)
    found = {}
    for name, (stage, options, factors) in cases.items():
        config = {"zero_optimization": {"stage": stage}, "fp16": {"enabled": True, **options}}
        history, said = fitted(config, factors, ranks=2)
        found[name] = history.skips, history.skips_in_a_row, history.verdict(), said
    return found


def test_ordinary_skips_are_not_told_and_nan_is() -> None:
    first, second = run_ranks(2, fits, timeout=240)
    told = "lightning-lockstep: DeepSpeed has just skipped 10 optimizer steps"
    for name, (skips, in_a_row, verdict, said) in first.items():
        assert second[name][:3] == (skips, in_a_row, verdict)
        if name == "nan":
            assert skips == in_a_row == 10 and said.count(told) == 1 and told not in second[name][3]
        else:
            assert skips > 1 and in_a_row == 0 and verdict is None and "has just skipped" not in said
