"""The group of ranks, and the store at which they meet."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from lightning_lockstep.distributed import rendezvous_store, shut_down
from lightning_lockstep.distributed.process_group import current_group, forget_rendezvous, host_rendezvous
from lightning_lockstep.distributed.side_channel.opening import open_side_channel
from lightning_lockstep.errors import LaunchError
from tests.harness import run_ranks


def test_a_store_that_was_hosted_before_gets_the_name_of_the_job() -> None:
    port = host_rendezvous("127.0.0.1")
    try:
        rendezvous_store(0, 2, address="127.0.0.1", port=port, name="job 1")
        seen_by_rank_1 = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        assert bytes(seen_by_rank_1.get("lockstep/name")) == b"job 1"
    finally:
        forget_rendezvous()


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
