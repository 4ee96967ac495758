"""When one rank fails, all stop: inside a collective, and with the first one's words."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_lockstep.distributed import FailurePropagation, current_communicator
from lightning_lockstep.distributed.coordination.communicator import in_rank_order
from lightning_lockstep.distributed.failure import process_exit
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.errors import ConfigurationError, RankFailedError
from tests.harness import run_ranks_raw


def propagation(grace: float) -> FailurePropagation:
    made = propagation_on(current_communicator().side_channel)
    made.attempt.grace_period = grace
    made.enter()
    return made


def exits() -> str:
    """All-reduce for ever; rank 1 exits at step 5."""
    crash = propagation(6.0)
    try:
        for step in range(100_000):
            crash.check()
            if step == 5 and dist.get_rank() == 1:
                raise SystemExit(3)
            dist.all_reduce(torch.ones(8))
    except BaseException as error:
        raised = crash.error_to_raise(error)
        if raised is error:
            raise
        raise raised from None
    return "never"


def test_the_exit_code_of_a_rank_that_exits_is_the_jobs() -> None:
    outcomes = run_ranks_raw(2, exits, timeout=60)
    assert [outcome.returncode for outcome in outcomes] == [3, 3]


def stuck() -> str:
    """Rank 0 sits where no exception reaches it; the countdown has to end it."""
    crash = propagation(2.0)
    if dist.get_rank() == 1:
        raise crash.error_to_raise(ValueError("boom while rank 0 sleeps"))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
    time.sleep(600)
    return "never"


def test_a_rank_that_cannot_be_reached_is_ended_by_force_with_the_report() -> None:
    outcomes = run_ranks_raw(2, stuck, timeout=60)
    assert not any(outcome.killed_by_helper for outcome in outcomes)
    assert outcomes[0].returncode == 1
    report = outcomes[0].stderr.rstrip()
    assert "lightning-lockstep: rank 1 of 2" in report
    assert report.endswith("ValueError: boom while rank 0 sleeps")


GRACE = 1.5


def caught_on_all_ranks() -> bool:
    """Every rank raises an error of the same type and catches it, one of them late; then all go on."""
    crash, rank = propagation(GRACE), dist.get_rank()
    for slow in (0, 2):
        for kind in (ValueError, ConfigurationError):
            crash.enter()
            crash.attempt.meet(60.0)
            dist.barrier()
            if rank == slow:
                time.sleep(0.3)
            error = kind(f"pruned on rank {rank}")
            assert crash.error_to_raise(error) is error
            crash.attempt.leave()
    crash.enter()
    crash.attempt.meet(60.0)
    dist.barrier()
    time.sleep(GRACE + 0.3)  # what would end a rank would have ended it by now
    crash.check()
    assert process_exit.exit_plan.forced_exit is None
    dist.barrier()  # all have looked
    error = ValueError("pruned in the last fit")
    assert crash.error_to_raise(error) is error
    crash.attempt.leave()
    time.sleep(GRACE + 0.3)  # the program does something else, and ends without another fit
    return True


def test_an_error_that_all_ranks_raise_and_catch_is_survived() -> None:
    outcomes = run_ranks_raw(3, caught_on_all_ranks, timeout=60)
    assert [(outcome.value, outcome.returncode) for outcome in outcomes] == [(True, 0)] * 3, outcomes


def raise_beside_a_frozen_rank() -> tuple[str, float, bool]:
    crash = propagation(3.0)
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    while psutil.Process(pids[0]).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    began = time.monotonic()
    raised = crash.error_to_raise(ValueError("boom beside a frozen rank"))
    seconds = time.monotonic() - began
    os.kill(pids[0], signal.SIGKILL)  # nothing waits for the limit of the test
    return str(raised), seconds, process_exit.exit_report_of(raised).replaces


def test_a_rank_whose_rank_0_is_frozen_prints_its_own_error() -> None:
    outcomes = run_ranks_raw(2, raise_beside_a_frozen_rank, timeout=60)
    text, seconds, is_quiet = outcomes[1].value
    assert outcomes[0].signal == signal.SIGKILL
    assert text == "boom beside a frozen rank" and seconds < 10 and not is_quiet


def wait_after_the_last_fit() -> tuple[str, float]:
    crash = propagation(3.0)
    crash.attempt.leave()
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankFailedError) as raised, in_rank_order(timeout=500):
        pass
    return str(raised.value), time.monotonic() - began


def test_a_wait_outside_of_fits_ends_when_a_rank_is_lost() -> None:
    text, seconds = run_ranks_raw(2, wait_after_the_last_fit, timeout=60)[1].value
    assert text.startswith("rank 0 of 2") and seconds < 20


def raise_in_rank_order() -> str:
    crash, rank = propagation(3.0), dist.get_rank()
    try:
        with in_rank_order():
            if rank == 1:
                raise ValueError("boom")
    except Exception as error:
        time.sleep(0.3 * rank)  # the others hear of it by in_rank_order first
        return str(crash.error_to_raise(error)).partition("\n")[0]
    return "never"


def test_a_rank_that_raises_in_rank_order_is_the_failure_that_all_report() -> None:
    zero, one = run_ranks_raw(2, raise_in_rank_order, timeout=60)
    assert one.value == "boom"
    assert zero.value.startswith("rank 1 of 2 (host ") and zero.value.endswith("failed: ValueError: boom")
