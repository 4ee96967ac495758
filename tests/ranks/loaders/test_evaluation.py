"""An evaluation on several ranks gives what Lightning gives on one device, whatever the number of samples.

Starting ranks is what costs, so each group of ranks runs all evaluations.
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.models.loaders.evaluation import SAMPLES, evaluations, parts_of_ranks


@functools.cache
def found(strategy: str, ranks: int) -> list[dict[str, Any]]:
    return run_ranks(ranks, evaluations, strategy, ranks, timeout=120, backend=None)


def check(ranks: list[dict[str, Any]]) -> None:
    """Compare what each rank got with one device, within 1e-5; fail with the first differences."""
    (expected,) = found("Lightning", 1)
    differences = []
    for rank, of_rank in enumerate(ranks):
        for case in (*(f"test {number}" for number in SAMPLES), "several", "limited", "joined", "fit"):
            one, other = of_rank[case], expected[case]
            assert one.keys() == other.keys(), f"rank {rank}, {case}"
            compared = [name for name in one if not name.endswith(("hook", "rank zero"))]
            differences += [
                f"rank {rank}, {case}, {name}: {one[name]}, on one device {other[name]}"
                for name in compared
                if not abs(one[name] - other[name]) <= 1e-5
            ]
            # Both are this rank's number: one is the mean of all ranks, the other is left to Lightning.
            assert {one[n] for n in one if n.endswith("hook")} == {(len(ranks) - 1) / 2}
            assert {one[n] for n in one if n.endswith("rank zero")} == {rank}
            for name in ("loss", "of some", "double"):
                assert one.get(name) == ranks[0][case].get(name), "the same on all ranks, bit for bit"
        assert of_rank["advice"] == []
    assert differences == []
    for number, of_all in expected["predict"].items():
        rows = sorted(row for of_rank in ranks for row in of_rank["predict"][number]["rows"])
        assert [row[0] for row in rows] == [*range(number)], "each sample once, none of a padding batch"
        assert [*chain(*rows)] == pytest.approx([*chain(*of_all["rows"])], abs=1e-5)
        written = [of_rank["predict"][number] for of_rank in ranks]
        assert sorted(index for each in written for index in each["batches"]) == [*range(number)]
        assert sorted(pair for each in written for pair in each["epoch"]) == [(i, i) for i in range(number)]


def test_ddp() -> None:
    check(found("ddp", 3))


def test_fsdp() -> None:
    check(found("fsdp", 2))


def test_a_rank_without_batches_keeps_nobody_waiting() -> None:
    """Its loader is empty, or that of some loaders; the value of the others is the mean over what they have."""
    counts = [[8, 5], [13, 0]]
    first, second = run_ranks(2, parts_of_ranks, counts, backend=None)
    assert first[0] == second[0] and {*first[0]} == {"loss", "one"}, "what rank 1 alone has logged is there"
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], abs=1e-6), "parts of 8 and 5, or all of rank 0"
    assert second[1] == {}, "no batch, so no values"
    names = [f"loss/dataloader_idx_{number}" for number in (0, 1)]
    assert first[2][names[0]] == second[2][names[0]] == first[0]["loss"]
    assert first[2][names[1]] == first[1]["loss"] and names[1] not in second[2]
