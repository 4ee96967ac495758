"""Ends of ranks that take long: a report is still being written, or nobody catches what all have raised."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.failure import process_exit
from lightning_lockstep.distributed.failure.propagation import propagation_on
from tests.helpers import run_ranks_raw


def slow_report() -> str:
    """Rank 1 fails; rank 0 is still writing a report when the grace period ends."""
    crash = propagation_on(current_communicator().side_channel)
    crash.grace_period = 1.0
    crash.enter()
    dist.barrier()
    if dist.get_rank() == 1:
        raise crash.error_to_raise(ValueError("boom"))
    with process_exit.outcome.writes_report:
        time.sleep(3.0)
        print("report written", flush=True)
    time.sleep(60)
    return "never"


def test_a_forced_end_waits_for_a_report_that_is_being_written() -> None:
    outcomes = run_ranks_raw(2, slow_report, timeout=60)
    assert "report written" in outcomes[0].stdout and outcomes[0].returncode == 1
    assert not outcomes[0].killed_by_helper


def raise_on_all_and_hang() -> None:
    """Nobody catches the error that every rank raises, and a thread would hold each process."""
    crash = propagation_on(current_communicator().side_channel)
    crash.grace_period = 0.5
    crash.enter()
    dist.barrier()
    error = crash.error_to_raise(ValueError(f"boom on rank {dist.get_rank()}"))
    sys.excepthook(type(error), error, None)  # as Python does before it waits for the threads
    time.sleep(600)


def test_an_error_that_nobody_catches_on_any_rank_ends_them_all_in_time() -> None:
    outcomes = run_ranks_raw(2, raise_on_all_and_hang, timeout=60)
    assert [outcome.returncode for outcome in outcomes] == [1, 1], outcomes
    assert not any(outcome.killed_by_helper for outcome in outcomes)
