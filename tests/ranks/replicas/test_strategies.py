"""ReplicaCheck under DeepSpeed, which divides what it compares elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_lockstep import LockstepDeepSpeedStrategy
from tests.harness import run_ranks
from tests.models.replicas.fits import Case, fit

#: Stage and what goes wrong, whether it is found. The engine writes all weights anew in its next step.
CASES = {(2, ""): False, (2, "layer"): True, (3, "layer"): False}


def stages() -> dict[Any, dict[str, Any]]:
    return {
        (stage, fault): fit(
            Case(fault=fault, steps=7, step=5, optimizer="Adam"),
            plain_strategy=LockstepDeepSpeedStrategy(stage=stage),
        )
        for stage, fault in CASES
    }


@pytest.fixture(scope="module")
def found() -> dict[Any, dict[str, Any]]:
    return run_ranks(2, stages, backend="gloo", timeout=240)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_each_rank_has_whole_is_compared(found: dict[Any, dict[str, Any]], case: Any) -> None:
    outcome = found[case]
    if CASES[case]:
        assert "first.weight" in outcome["error"]
    else:
        assert outcome["error"] is None and outcome["lines"] == []
