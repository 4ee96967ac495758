"""One entry of every rank over the side channel, with who is missing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from lightning_lockstep.distributed import Gather, SideChannel, current_communicator
from lightning_lockstep.errors import CollectiveStallError
from tests.harness import run_ranks


def over_steps() -> dict[str, Any]:
    rank, channel = dist.get_rank(), current_communicator().side_channel
    gather = Gather(channel, "steps", timeout=1.0)
    dist.barrier()
    seen: dict[str, Any] = {"read": [gather.collect(step, [rank, step]).complete("it") for step in range(30)]}
    if rank != 1:
        with pytest.raises(CollectiveStallError) as error:
            gather.collect(99, rank).complete("The metric at step 99")
        seen["error"] = str(error.value)
    dist.barrier()
    return seen


def waited_for() -> dict[str, Any]:
    rank, channel = dist.get_rank(), current_communicator().side_channel
    gather = Gather(channel, "waited", timeout=1.0)
    dist.barrier()
    all_of_them = gather.collect("all", {"rank": rank})
    at_main = gather.collect("main", rank, for_all=False)
    late = gather.collect("late", rank) if rank != 1 else None
    dist.barrier()
    if rank == 1:  # comes when the others have gone on: it gets what they got
        late = gather.collect("late", rank)
    dist.barrier()
    gather.collect("after", rank)
    kept = len(gather._coming) + len(gather._complete)
    return {"all": all_of_them.entries, "main": at_main, "late": late, "kept": kept}


def without_the_collecting_rank() -> tuple[Any, float]:
    rank, channel = dist.get_rank(), current_communicator().side_channel
    gather = Gather(channel, "no answer", timeout=0.5)
    dist.barrier()
    began = time.monotonic()
    gathered = gather.collect(1, rank) if rank else None
    took = time.monotonic() - began
    dist.barrier()
    return gathered, took


def cases() -> tuple[dict[str, Any], dict[str, Any], tuple[Any, float]]:
    return over_steps(), waited_for(), without_the_collecting_rank()


@pytest.fixture(scope="module")
def seen() -> list[Any]:
    return run_ranks(3, cases)


def test_entries_come_in_rank_order_and_an_error_names_who_is_missing(seen: list[Any]) -> None:
    values = [of_rank[0] for of_rank in seen]
    expected = [[[rank, step] for rank in range(3)] for step in range(30)]
    assert all(value["read"] == expected for value in values)
    assert values[0]["error"] == values[2]["error"]
    assert values[0]["error"] == ("The metric at step 99 did not come within 1 s: nothing from rank 1.")


def test_every_rank_gets_the_same_entries_or_rank_0_alone_does(seen: list[Any]) -> None:
    for rank, (_, answer, _) in enumerate(seen):
        assert answer["all"] == {r: {"rank": r} for r in range(3)}
        assert answer["main"].entries == ({rank: rank} if rank else {r: r for r in range(3)})
        assert answer["main"].missing == ()
        assert answer["kept"] == 0
        assert answer["late"].entries == ({0: 0, 1: 1, 2: 2} if rank == 1 else {0: 0, 2: 2})
        assert answer["late"].missing == (1,)


def test_a_rank_that_gets_no_answer_has_its_own_entry_and_goes_on(seen: list[Any]) -> None:
    for rank, (_, _, (gathered, took)) in enumerate(seen):
        if rank:
            assert gathered.entries == {rank: rank} and 0 in gathered.missing
            assert took < 20


@pytest.mark.parametrize("for_all", [True, False])
def test_one_process_has_its_own_entry(for_all: bool) -> None:
    gather = Gather(SideChannel(), "test")
    assert gather.collect("key", "mine", for_all=for_all).complete("it") == ["mine"]
    gather.close()
