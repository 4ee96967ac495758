"""The run is known by rank, size and store: with torch's process group, and without one."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.distributed import (
    Communicator,
    Gather,
    PendingReduction,
    RankGroup,
    SideChannel,
    current_communicator,
    rendezvous_store,
    shut_down,
    use_communicator,
)
from lightning_lockstep.distributed.process_group import current_group, forget_rendezvous, host_rendezvous
from lightning_lockstep.distributed.side_channel.opening import (
    open_side_channel,
    side_channel_if_open,
)
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from tests.helpers import run_ranks, run_ranks_raw


class WithoutTorch(Communicator):
    """Decides over the side channel, as ranks may that have no collective on the CPU."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__()
        self.rank, self.world_size, self._number = group.rank, group.world_size, 0
        self._gather: Gather | None = None

    @property
    def side_channel(self) -> SideChannel:
        return open_side_channel()

    def gather(self, obj: Any) -> list[Any]:
        self._gather = self._gather or Gather(self.side_channel, "communicator")
        self._number += 1
        return self._gather.collect(self._number, obj).complete("The objects of all ranks")

    def broadcast(self, obj: Any, source: int = 0) -> Any:
        return self.gather(obj)[source]

    def all_reduce_async(self, tensor: Tensor, op: str = "sum") -> PendingReduction:
        everyone = torch.tensor(self.gather(tensor.tolist()))
        return PendingReduction(tensor.copy_(everyone.amax(0) if op == "max" else everyone.sum(0)), None)

    def barrier(self) -> None:
        self.gather(None)


def meet() -> RankGroup:
    """The ranks have a TCPStore and nothing else."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = RankGroup(rank, world_size, rendezvous_store(rank, world_size))
    use_communicator(WithoutTorch(group), group)
    assert not dist.is_initialized()
    return group


def test_a_store_that_was_hosted_before_gets_the_name_of_the_job() -> None:
    port = host_rendezvous("127.0.0.1")
    try:
        rendezvous_store(0, 2, address="127.0.0.1", port=port, name="job 1")
        seen_by_rank_1 = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        assert bytes(seen_by_rank_1.get("lockstep/name")) == b"job 1"
    finally:
        forget_rendezvous()


def test_a_name_that_nobody_knows_is_said_at_once_and_given_up_soon(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(LaunchError, match=r"MASTER_ADDR='no-host.invalid' cannot be resolved on"):
        rendezvous_store(1, 2, address="no-host.invalid", port=1, timeout=0.1)
    assert "waits until the name 'no-host.invalid'" in capsys.readouterr().err


def decide_without_process_group() -> dict[str, Any]:
    group = meet()
    communicator = current_communicator()
    agreed = communicator.agree(group.rank == 1, "out of data")
    answer = {
        "rank": communicator.rank,
        "agreed": str(agreed),
        "same": side_channel_if_open() is communicator.side_channel and current_group() is group,
    }
    communicator.barrier()
    shut_down()
    return answer | {"after": current_group()}


def test_ranks_with_a_store_alone_have_a_side_channel_and_decide_together() -> None:
    answers = run_ranks(2, decide_without_process_group, backend=None)
    for rank, answer in enumerate(answers):
        assert answer == {"rank": rank, "agreed": "rank 1: out of data", "same": True, "after": None}


def fail_without_process_group() -> str:
    group = meet()
    supervisor = RankSupervisor(SupervisorSettings(grace_period=6.0))
    supervisor.ranks_have_met(prints_report=group.rank == 0)

    def work() -> str:
        for step in range(1000):
            supervisor.at_step_boundary()
            if step == 5 and group.rank == 1:
                raise ValueError("boom without a process group")
            time.sleep(0.02)
        return "never stopped"

    return supervisor.run(work)


def test_a_failure_reaches_ranks_with_a_store_alone() -> None:
    outcomes = run_ranks_raw(2, fail_without_process_group, backend=None, timeout=60)
    assert not any(outcome.killed_by_helper for outcome in outcomes)
    assert outcomes[1].exception == "ValueError: boom without a process group"
    stopped = outcomes[0].exception or ""
    assert stopped.startswith("RankFailedError: rank 1 of 2")
    assert stopped.rstrip().endswith("ValueError: boom without a process group")


def groups_of_torch() -> list[bool]:
    groups = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        groups.append(current_group())
        same = current_group() is groups[-1]
        dist.destroy_process_group()
    first, second = groups
    assert first is not None and second is not None
    return [same, first is second, first == second, current_group() is None, first.store is None]


def test_a_process_group_made_anew_is_another_group() -> None:
    assert run_ranks(1, groups_of_torch, backend=None) == [[True, False, False, True, False]]


def late_rank_0() -> str:
    """Rank 0 comes 2 s late to the side channel of a group whose ranks wait for each other for 1 s."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=1.0))
    if dist.get_rank() == 0:
        time.sleep(2.0)
    try:
        return type(open_side_channel()).__name__
    except LaunchError as error:
        return str(error)
    finally:
        shut_down()


def test_the_ranks_wait_for_the_side_channel_as_long_as_the_group_waits() -> None:
    zero, one = run_ranks(2, late_rank_0, backend=None)
    assert zero == "ZeroMQSideChannel"
    assert one.startswith("Rank 1 of 2 waited up to 1 s for rank 0 to open the side channel.")
