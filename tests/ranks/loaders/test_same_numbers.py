"""Each optimizer step is the mean over its samples, or its tokens, on any number of ranks.

Other loaders, losses, strategies and resumes are drawn by the random programs (tests/ranks/same_numbers).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.errors import ConfigurationError
from tests.harness import run_ranks
from tests.models.loaders.same_numbers import difference, fitted

#: The fit of each: samples, micro-batches of an optimizer step, and what else.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "103 samples, accumulated": (103, 4, {}),
    "float32, tokens": (97, 2, {"dtype": torch.float32, "counts": True}),
}


def fits(*, accumulates: bool = True) -> dict[str, Any]:
    return {
        name: fitted(LockstepDDPStrategy(), count, accumulate if accumulates else 1, **options)
        for name, (count, accumulate, options) in CASES.items()
    }


def test_the_weights_are_those_of_one_process_without_accumulation() -> None:
    (alone,) = run_ranks(1, partial(fits, accumulates=False), backend=None, timeout=120)
    for rank in run_ranks(3, fits, backend=None, timeout=120):
        for case, (steps, weights) in alone.items():
            assert rank[case][0] == steps
            assert difference(rank[case][1], weights) < (1e-5 if "float32" in case else 1e-12), case


#: What rank 1 returns as num_items in a batch, and what all ranks raise; rank 0 returns 7.
WRONG: dict[str, tuple[Callable[[int], float | None], str]] = {
    "negative": (lambda batch: -1, "num_items=-1 on rank 1"),
    "nan": (lambda batch: float("nan"), "num_items=nan on rank 1"),
    "not returned": (lambda batch: 7 if batch == 0 else None, "no num_items on rank 1"),
    "never returned": (lambda batch: None, "no num_items on rank 1"),
    "never returned, join": (lambda batch: None, "no num_items on rank 1"),
}


def wrong_items() -> dict[str, str]:
    def refused(of_rank_1: Callable[[int], float | None], joins: bool) -> str:
        # With loaders of its own a rank may run out before the others, and samples are counted in each step.
        options: dict[str, Any] = {"own_lengths": True} if joins else {}
        strategy = LockstepDDPStrategy(uneven_inputs="join") if joins else LockstepDDPStrategy()
        with pytest.raises(ConfigurationError) as caught:
            items = lambda rank, batch: of_rank_1(batch) if rank else 7  # noqa: E731
            fitted(strategy, 32, 1, counts=True, items=items, **options)
        return str(caught.value)

    return {case: refused(of_rank_1, case.endswith("join")) for case, (of_rank_1, _) in WRONG.items()}


def test_a_number_of_items_that_cannot_be_is_one_error_on_all_ranks() -> None:
    for told in run_ranks(2, wrong_items, backend=None, timeout=60):
        assert told == {
            case: f"training_step returned {words}: expected the number of items, 0 or more, on every rank."
            for case, (_, words) in WRONG.items()
        }
