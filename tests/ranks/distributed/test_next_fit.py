"""A program that catches the error of one rank and fits again, while the other ranks are still in the first fit."""

from __future__ import annotations

import socket
import time

import pytest
import torch
import torch.distributed as dist

from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.errors import RankFailedError
from tests.helpers import run_ranks_raw

GRACE = 6.0


def caught_on_one_rank(who: int) -> list[tuple[str, float]]:
    """Return what each fit of this rank ends with, and how many seconds after the error."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as own,
        listener.accept()[0] as end,
    ):
        ended = fits(who)
        own.sendall(b"x")
        assert end.recv(1) == b"x", "what is the program's own stays open"
    return ended


def fits(who: int) -> list[tuple[str, float]]:
    crash, ended = propagation_on(current_communicator().side_channel), []
    crash.grace_period = GRACE
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    for fit in range(3):
        began = time.monotonic()
        try:
            crash.begin_fit()
            for step in range(5 if fit == 0 else 1000):
                crash.check()
                # The others look at failures no more before the collective in which they then wait.
                if (fit, step) == (1, 3):
                    store.set(f"at it/{rank}", b"")
                    if rank == who:
                        store.wait([f"at it/{other}" for other in range(3)])
                        raise ValueError("caught")
                dist.all_reduce(torch.ones(8))
            ended.append(("fitted", time.monotonic() - began))
        except BaseException as error:
            raised = crash.error_to_raise(error)
            name = "RankFailedError" if isinstance(raised, RankFailedError) else type(raised).__name__
            is_named = f"rank {who} of 3" in str(raised) and str(raised).rstrip().endswith(
                "ValueError: caught"
            )
            ended.append((name if is_named or raised is error else str(raised), time.monotonic() - began))
    return ended


@pytest.mark.parametrize("who", [0, 1])
def test_the_others_hear_of_it_in_time_and_the_rank_that_goes_on_ends_with_the_same(who: int) -> None:
    for rank, outcome in enumerate(run_ranks_raw(3, caught_on_one_rank, who, timeout=60)):
        ended = outcome.value
        assert (outcome.returncode, outcome.killed_by_helper) == (1, False), outcome
        names, seconds = zip(*ended, strict=True)
        assert names == ("fitted", "ValueError" if rank == who else "RankFailedError", "RankFailedError"), (
            ended
        )
        assert max(seconds) < GRACE, ended
