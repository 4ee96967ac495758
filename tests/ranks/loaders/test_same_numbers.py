"""Each optimizer step is the mean over its samples, or its tokens, on any number of ranks; a resume sees each once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.errors import ConfigurationError
from tests.common.loaders.same_numbers import difference, fitted, seen_samples
from tests.helpers import run_ranks

#: The fit of each: samples, micro-batches of an optimizer step, and what else.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "97 samples": (97, 1, {}),
    "103 samples, accumulated": (103, 4, {}),
    "tokens": (97, 1, {"counts": True}),
    "tokens, accumulated, clipped": (101, 2, {"counts": True, "gradient_clip_val": 0.1}),
    "a sampler that draws": (97, 1, {"sampler": True}),
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


@pytest.fixture(scope="module")
def several() -> list[dict[str, Any]]:
    return run_ranks(3, fits, backend=None, timeout=120)


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_one_process(case: str, several: Any, alone: Any) -> None:
    steps, weights = alone[case]
    for rank in several:
        assert rank[case][0] == steps
        assert difference(rank[case][1], weights) < (1e-5 if "float32" in case else 1e-12)


def seen_here(folder: str, steps: int) -> list[list[tuple[int, int]]]:
    resumes = steps < 0
    return [seen_samples(folder, steps, resumes=resumes, stream=stream) for stream in (False, True)]


def test_a_fit_of_four_ranks_goes_on_with_three_at_the_very_sample(tmp_path: Path) -> None:
    before = run_ranks(4, seen_here, str(tmp_path), 9, backend=None, timeout=60)
    after = run_ranks(3, seen_here, str(tmp_path), -1, backend=None, timeout=60)
    for case in (0, 1):
        seen = Counter(sample for rank in before + after for sample in rank[case])
        assert len(seen) == 2 * 97 and set(seen.values()) == {1}, ("loader", "stream")[case]


def wrong_items() -> list[str]:
    found = []
    for items in (-1, float("nan")):
        with pytest.raises(ConfigurationError) as caught:
            fitted(LockstepDDPStrategy(), 16, 1, counts=True, items=items)
        found.append(str(caught.value))
    return found


def test_a_number_of_items_that_cannot_be_is_refused() -> None:
    ((negative, not_a_number),) = run_ranks(1, wrong_items, backend=None)
    assert negative == "training_step returned num_items=-1.0: expected how many there are, 0 or more."
    assert "num_items=nan" in not_a_number
