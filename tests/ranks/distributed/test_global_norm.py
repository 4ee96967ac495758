"""Batch norm over the samples of all ranks, beside torch's own in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_ranks
from tests.models.distributed import global_norms as norms


def cases() -> Any:
    return norms.differences(), norms.single_value(), norms.apart()


@pytest.fixture(scope="module")
def seen() -> list[Any]:
    return run_ranks(4, cases, timeout=120)


@pytest.mark.parametrize("name", norms.CASES)
def test_weights_and_statistics_are_those_of_one_process(name: str, seen: list[Any]) -> None:
    tolerance = norms.TOLERANCES[norms.CASES[name].dtype]
    assert max(found[0][name][0] for found in seen) < tolerance


def test_all_ranks_have_the_same_bits(seen: list[Any]) -> None:
    assert all(same for found in seen for _, same in found[0].values())


def test_a_single_value_of_all_ranks_is_an_error_on_each(seen: list[Any]) -> None:
    assert [text.partition(":")[0] for _, text, _ in seen] == [
        "batch norm was given a single value of each channel on all ranks together, (1, 2) on this one"
    ] * 4


def test_a_step_apart_from_the_other_ranks_has_its_own_statistics(seen: list[Any]) -> None:
    assert all(found[2] for found in seen)
