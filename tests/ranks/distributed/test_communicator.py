"""Deciding together: one body for one rank and for several."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from lightning_lockstep.distributed import (
    SingleProcessCommunicator,
    TorchCommunicator,
    current_communicator,
    shut_down,
)
from tests.helpers import run_ranks, world_size


def decide() -> dict[str, object]:
    communicator = current_communicator()
    rank = communicator.rank
    nobody = communicator.agree(False, "never said")
    some = communicator.agree(rank == communicator.world_size - 1, f"rank {rank} is full")
    pending = communicator.all_reduce_async(torch.tensor([float(rank + 1)]), "mean")
    answer = {
        "kind": type(communicator).__name__,
        "same": communicator is current_communicator(),
        "facts": (rank, communicator.world_size, communicator.is_main, communicator.local_rank),
        "nobody": (bool(nobody), dict(nobody.reasons)),
        "some": (bool(some), dict(some.reasons), str(some)),
        "gather": communicator.gather({"rank": rank}),
        "broadcast": communicator.broadcast(f"from {rank}", communicator.world_size - 1),
        "sum": communicator.all_reduce(torch.tensor(rank + 1)).item(),
        "max": communicator.all_reduce(torch.tensor(rank), "max").item(),
        "min": communicator.all_reduce(torch.tensor(rank), "min").item(),
        "mean": (pending.wait().item(), pending.done()),
    }
    communicator.barrier()
    shut_down()
    return answer


@world_size(1, 2, 4)
def test_every_rank_gets_the_same_answers(world_size: int) -> None:
    answers = run_ranks(world_size, decide)
    last = world_size - 1
    for rank, answer in enumerate(answers):
        assert answer["kind"] == ("SingleProcessCommunicator" if world_size == 1 else "TorchCommunicator")
        assert answer["same"] is True
        assert answer["facts"] == (rank, world_size, rank == 0, rank)
        assert answer["nobody"] == (False, {})
        assert answer["some"] == (True, {last: f"rank {last} is full"}, f"rank {last}: rank {last} is full")
        assert answer["gather"] == [{"rank": r} for r in range(world_size)]
        assert answer["broadcast"] == f"from {last}"
        assert answer["sum"] == world_size * (world_size + 1) // 2
        assert (answer["min"], answer["max"]) == (0, last)
        assert answer["mean"] == ((world_size + 1) / 2, True)


def test_without_a_process_group_it_is_the_null_object() -> None:
    communicator = current_communicator()
    assert isinstance(communicator, SingleProcessCommunicator)
    assert communicator.world_size == 1
    shut_down()


def late_decision() -> tuple[bool, float]:
    communicator = current_communicator()
    if communicator.rank == 0:
        time.sleep(1.0)
    started = time.monotonic()
    agreement = communicator.agree(communicator.rank == 0, "late but heard")
    return bool(agreement), time.monotonic() - started


def test_a_late_rank_is_waited_for_and_heard() -> None:
    on_time = run_ranks(2, late_decision)
    assert [said for said, _ in on_time] == [True, True]
    assert on_time[1][1] > 0.5, "rank 1 has to wait for rank 0's word"


def raises_after_agreeing() -> str:
    communicator = current_communicator()
    agreement = communicator.agree(communicator.rank == 1, "cannot read shard 7")
    if agreement:
        try:
            raise ValueError(str(agreement))
        except ValueError as error:
            return str(error)
    return "nothing"


def test_a_fault_of_one_rank_becomes_the_same_error_on_all() -> None:
    assert run_ranks(2, raises_after_agreeing) == ["rank 1: cannot read shard 7"] * 2


def facts_from_environment() -> tuple[int, int]:
    os.environ["NODE_RANK"] = "3"
    communicator = TorchCommunicator()
    explicit = TorchCommunicator(local_rank=5, node_rank=6)
    assert (explicit.local_rank, explicit.node_rank) == (5, 6)
    return communicator.local_rank, communicator.node_rank


def test_local_and_node_rank_come_from_the_environment_or_the_caller() -> None:
    assert run_ranks(2, facts_from_environment) == [(0, 3), (1, 3)]


def regroup() -> list[int]:
    first = current_communicator()
    shut_down(destroy_process_group=True)
    assert not dist.is_initialized()
    alone = current_communicator()
    return [first.world_size, alone.world_size]


def test_shutting_down_leaves_a_process_on_its_own() -> None:
    assert run_ranks(2, regroup) == [[2, 1], [2, 1]]


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
def test_one_process_answers_for_itself(op: str) -> None:
    alone = SingleProcessCommunicator()
    assert alone.all_reduce(torch.tensor([3.0]), op).item() == 3.0  # type: ignore[arg-type]
