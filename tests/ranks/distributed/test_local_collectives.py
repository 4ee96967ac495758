"""Collectives that one of several ranks answers by itself, while the others are elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from lightning_lockstep.distributed.local_collectives import local_collectives
from tests.harness import run_ranks
from tests.models.distributed.local_calls import check, four, one_alone


def sub_group() -> Any:
    """Rank 1 alone uses a group of both ranks and one of itself."""
    groups = [dist.new_group([0, 1]), dist.new_group([1])]
    totals = []
    if dist.get_rank() == 1:
        with local_collectives():
            for group in (*groups, None):
                total = torch.ones(1)
                dist.all_reduce(total, group=group)
                totals.append(total.item())
    dist.barrier()
    return totals


def compiled() -> Any:
    """Count what a compiled step is compiled to, and what it gives with answers and without."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def step(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(tensor, "sum", dist.group.WORLD) * 2

    alone = [step(four()).tolist()]
    with local_collectives() as local:
        if dist.get_rank() == 1:
            alone.append(step(four()).tolist())
    dist.barrier()
    return alone, len(local), step(four()).tolist(), len(graphs)


def cases() -> Any:
    return [one_alone(0), one_alone(1), sub_group(), compiled()]


@pytest.fixture(scope="module")
def seen() -> list[Any]:
    return run_ranks(2, cases, timeout=120)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_operation_is_answered_and_the_group_is_left_as_it_was(rank: int, seen: list[Any]) -> None:
    check(rank, seen[rank][rank][0])
    assert [each[rank][1:] for each in seen] == [(6.0, 2.0)] * 2


def test_a_sub_group_counts_its_own_ranks(seen: list[Any]) -> None:
    assert seen[1][2] == [2.0, 1.0, 2.0]


def test_compiled_code_is_answered_and_not_compiled_again(seen: list[Any]) -> None:
    four_times = (4 * four()).tolist()
    assert seen[0][3] == ([four_times], 0, four_times, 1)
    assert seen[1][3] == ([four_times] * 2, 1, four_times, 1)


def test_without_a_process_group_nothing_is_done() -> None:
    with local_collectives() as local:
        assert not local
