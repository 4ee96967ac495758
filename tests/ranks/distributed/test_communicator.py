"""Deciding together: one body for one rank and for several."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_lockstep.distributed import current_communicator, shut_down
from tests.harness import run_ranks


def decide() -> dict[str, object]:
    communicator = current_communicator()
    rank = communicator.rank
    nobody = communicator.agree(False, "never said")
    some = communicator.agree(rank == communicator.world_size - 1, f"rank {rank} is full")
    wait = communicator.all_reduce_async(torch.tensor(rank + 1))
    answer = {
        "same": communicator is current_communicator(),
        "facts": (rank, communicator.world_size, communicator.is_main),
        "nobody": nobody,
        "some": some,
        "gather": communicator.gather({"rank": rank}),
        "broadcast": communicator.broadcast(f"from {rank}", communicator.world_size - 1),
        "passed on": communicator.pass_on(bytes([rank] * (rank + 1))),
        "max": communicator.all_reduce(torch.tensor(rank), "max").item(),
        "min": communicator.all_reduce(torch.tensor(rank), "min").item(),
        "sum": wait().item(),
    }
    communicator.barrier()
    shut_down()
    return answer


def regroup() -> list[int]:
    """Shutting down leaves a process on its own."""
    first = current_communicator()
    shut_down(destroy_process_group=True)
    assert not dist.is_initialized()
    return [first.world_size, current_communicator().world_size]


def cases() -> tuple[dict[str, object], list[int]]:
    return decide(), regroup()


def check(answer: dict[str, object], rank: int, world_size: int) -> None:
    last = world_size - 1
    assert answer["same"] is True
    assert answer["facts"] == (rank, world_size, rank == 0)
    assert (answer["nobody"], answer["some"]) == ({}, {last: f"rank {last} is full"})
    assert answer["gather"] == [{"rank": r} for r in range(world_size)]
    assert answer["broadcast"] == f"from {last}"
    before = rank - 1 if rank else last
    assert answer["passed on"] == bytes([before] * (before + 1))
    assert answer["sum"] == world_size * (world_size + 1) // 2
    assert (answer["min"], answer["max"]) == (0, last)


def test_every_rank_gets_the_same_answers_and_is_on_its_own_afterwards() -> None:
    for rank, (answer, sizes) in enumerate(run_ranks(3, cases)):
        check(answer, rank, 3)
        assert sizes == [3, 1]


def test_a_process_without_others_decides_alone() -> None:
    check(decide(), 0, 1)
