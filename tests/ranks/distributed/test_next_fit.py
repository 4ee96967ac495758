"""A program that catches the error of one rank and fits again, while the other ranks are still in the first fit."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from lightning_lockstep.distributed import FailurePropagation, current_communicator
from lightning_lockstep.distributed.failure.propagation import propagation_on
from tests.helpers import run_ranks_raw

GRACE = 3.0


def caught_on_one_rank(who: int) -> list[str]:
    """Return what each fit of this rank ends with, once the others have been ended."""
    crash = propagation_on(current_communicator().side_channel)
    crash.grace_period = GRACE
    ended = [end_of_fit(crash, number, who) for number in range(3)]
    time.sleep(
        GRACE / 2 + 0.3
    )  # the others end at 0.9 of their grace period, and this one has waited for half of it
    return ended


def end_of_fit(crash: FailurePropagation, number: int, who: int) -> str:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    try:
        crash.begin_fit()
        for step in range(5 if number == 0 else 1000):
            crash.check()
            # The others look at failures no more before the collective in which they then wait.
            if (number, step) == (1, 3):
                store.set(f"at it/{rank}", b"")
                if rank == who:
                    store.wait([f"at it/{other}" for other in range(3)])
                    raise ValueError("caught")
            dist.all_reduce(torch.ones(8))
    except BaseException as error:
        raised = crash.error_to_raise(error)
        named = f"rank {who} of 3" in str(raised) and str(raised).rstrip().endswith("ValueError: caught")
        return type(raised).__name__ if named or raised is error else str(raised)
    return "fitted"


@pytest.mark.parametrize("who", [0, 1])
def test_the_rank_that_goes_on_ends_with_its_error_and_the_others_with_their_grace_period(who: int) -> None:
    outcomes = run_ranks_raw(3, caught_on_one_rank, who, timeout=60)
    assert [(outcome.returncode, outcome.killed_by_helper) for outcome in outcomes] == [(1, False)] * 3, (
        outcomes
    )
    assert outcomes[who].value == ["fitted", "ValueError", "RankFailedError"]
    if who != 0:
        assert outcomes[0].stderr.rstrip().endswith("ValueError: caught"), "rank 0 prints the report"
