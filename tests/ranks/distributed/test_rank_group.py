"""The group of ranks, and the store at which they meet."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from lightning_lockstep.distributed import shut_down
from lightning_lockstep.distributed.side_channel.opening import open_side_channel
from lightning_lockstep.errors import LaunchError
from tests.harness import run_ranks


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
    assert one.startswith("Rank 0 has not opened the side channel: look at what it printed.")
    assert "1000ms" in one
