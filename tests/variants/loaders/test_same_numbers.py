"""The same weights on one to four ranks: all divisions, and every strategy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep import LockstepDDPStrategy, LockstepFSDPStrategy
from tests.common.loaders.same_numbers import difference, fitted, seen_samples
from tests.helpers import run_ranks

Case = tuple[int, int, bool]  # samples, micro-batches of a step, whether tokens are counted
CASES: list[Case] = [
    (n, a, counts) for n in (97, 100, 101, 103) for a in (1, 2, 4) for counts in (False, True)
]


def by_ddp() -> dict[Case, Any]:
    return {case: fitted(LockstepDDPStrategy(), case[0], case[1], counts=case[2]) for case in CASES}


@pytest.fixture(scope="module")
def alone() -> dict[Case, Any]:
    return run_ranks(1, by_ddp, backend=None, timeout=200)[0]


@pytest.mark.parametrize("ranks", [3])
def test_the_weights_do_not_depend_on_ranks_or_accumulation(ranks: int, alone: dict[Case, Any]) -> None:
    found = run_ranks(ranks, by_ddp, backend=None, timeout=300)[0]
    for samples, accumulate, counts in CASES:
        steps, weights = alone[samples, 1, counts]
        for one in (found, alone):
            assert one[samples, accumulate, counts][0] == steps
            assert difference(one[samples, accumulate, counts][1], weights) < 1e-12


SHARD: dict[str, Any] = {"iterable_datasets": "shard"}


def by_others(name: str) -> dict[Any, Any]:
    from lightning_lockstep import LockstepDeepSpeedStrategy

    made: dict[str, Any] = {
        "fsdp": lambda: LockstepFSDPStrategy(shard="auto", **SHARD),
        "fsdp, kept whole": lambda: LockstepFSDPStrategy(reshard_after_forward=False, **SHARD),
        **{
            f"stage {stage}": lambda stage=stage: LockstepDeepSpeedStrategy(stage=stage, **SHARD)
            for stage in (1, 2, 3)
        },
    }
    float32: dict[str, Any] = {"dtype": torch.float32}
    found = {
        "samples": fitted(made[name](), 97, 1, **float32),
        "accumulated": fitted(made[name](), 101, 2, **float32),
        "tokens": fitted(made[name](), 97, 1, counts=True, **float32),
        "stream": fitted(made[name](), 97, 1, stream=True, **float32),
    }
    if "fsdp" in name:
        found["tokens, accumulated"] = fitted(made[name](), 101, 2, counts=True, **float32)
    else:
        try:
            fitted(made[name](), 101, 2, counts=True, **float32)
        except Exception as error:
            found["refused"] = str(error)
    return found


def in_float32() -> dict[Any, Any]:
    float32: dict[str, Any] = {"dtype": torch.float32}
    return {
        "samples": fitted(LockstepDDPStrategy(), 97, 1, **float32),
        "accumulated": fitted(LockstepDDPStrategy(), 101, 2, **float32),
        "tokens": fitted(LockstepDDPStrategy(), 97, 1, counts=True, **float32),
        "tokens, accumulated": fitted(LockstepDDPStrategy(), 101, 2, counts=True, **float32),
        "stream": fitted(LockstepDDPStrategy(**SHARD), 97, 1, stream=True, **float32),
    }


@pytest.fixture(scope="module")
def expected() -> dict[Any, Any]:
    return run_ranks(1, in_float32, backend=None, timeout=100)[0]


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp, kept whole", "stage 1", "stage 2", "stage 3"])
def test_other_strategies_have_the_weights_of_one_process(strategy: str, expected: dict[Any, Any]) -> None:
    found = run_ranks(2, by_others, strategy, backend=None, timeout=200)[0]
    if "stage" in strategy:
        assert "num_items with accumulate_grad_batches=2 under DeepSpeed: expected 1" in found.pop("refused")
    assert len(found) >= 4
    for case, (steps, weights) in found.items():
        assert steps == expected[case][0]
        assert difference(weights, expected[case][1]) < 1e-5, case


def seen_here(folder: str, steps: int, accumulate: int, stream: bool) -> list[tuple[int, int]]:
    return seen_samples(folder, steps, resumes=steps < 0, accumulate=accumulate, stream=stream)


@pytest.mark.parametrize(("before", "after", "stream"), [(3, 4, False), (2, 2, True)])
def test_a_resume_sees_each_sample_once_where_accumulation_does_not_fit(
    tmp_path: Path, before: int, after: int, stream: bool
) -> None:
    given = str(tmp_path), 2, stream
    ranks = [
        *run_ranks(before, seen_here, given[0], 3, *given[1:], backend=None, timeout=100),
        *run_ranks(after, seen_here, given[0], -1, *given[1:], backend=None, timeout=100),
    ]
    seen = Counter(sample for rank in ranks for sample in rank)
    assert len(seen) == 2 * 97 and set(seen.values()) == {1}
