"""When one rank fails, all stop: inside a collective, and with the first one's words."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time

import psutil
import torch
import torch.distributed as dist

from lightning_lockstep.distributed import FailurePropagation, current_communicator
from lightning_lockstep.distributed.failure import process_exit
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.failure.record import tell_place_by
from lightning_lockstep.errors import ConfigurationError
from tests.helpers import run_ranks_raw


def propagation(grace: float) -> FailurePropagation:
    made = propagation_on(current_communicator().side_channel)
    made.grace_period = grace
    made.begin_fit()
    tell_place_by(lambda: {"step": 7})
    return made


def work(fault: str, rank: int) -> str:
    """All-reduce for ever; one rank is given a fault at step 5."""
    crash = propagation(6.0)
    try:
        for step in range(100_000):
            crash.check()
            if step == 5 and dist.get_rank() == rank:
                provoke(fault)
            dist.all_reduce(torch.ones(8))
    except BaseException as error:
        raised = crash.error_to_raise(error)
        if raised is error:
            raise
        raise raised from None
    return "never"


def provoke(fault: str) -> None:
    if fault == "exit":
        raise SystemExit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)  # the others wait in a collective
    raise ValueError("boom after a while")


def test_a_rank_that_raises_ends_all() -> None:
    outcomes = run_ranks_raw(3, work, "raise", 1, timeout=60)
    assert not any(outcome.killed_by_helper for outcome in outcomes), "they end by themselves"
    assert outcomes[1].exception == "ValueError: boom after a while"
    for outcome in (outcomes[0], outcomes[2]):
        stopped = (outcome.exception or "").rstrip()
        assert stopped.startswith("RankFailedError: rank 1 of 3") and "at step 7" in stopped, stopped
        assert stopped.endswith("ValueError: boom after a while")


def test_the_exit_code_of_a_rank_that_exits_is_the_jobs() -> None:
    outcomes = run_ranks_raw(2, work, "exit", 1, timeout=60)
    assert [outcome.returncode for outcome in outcomes] == [3, 3]


def test_when_rank_0_is_killed_the_others_say_so() -> None:
    """Nobody of ours has started it, so nobody knows its exit code."""
    outcomes = run_ranks_raw(3, work, "kill", 0, timeout=60)
    assert outcomes[0].signal is signal.SIGKILL
    gone = (
        rf"RankFailedError: rank 0 of 3 \(host {re.escape(socket.gethostname())}, process [1-9]\d*\) was lost"
    )
    for outcome in outcomes[1:]:
        assert outcome.exception is not None and re.match(gone, outcome.exception), outcome.exception


def stuck() -> str:
    """Rank 0 sits where no exception reaches it; the countdown has to end it."""
    crash = propagation(2.0)
    if dist.get_rank() == 1:
        raise crash.error_to_raise(ValueError("boom while rank 0 sleeps"))
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
            crash.begin_fit()
            dist.barrier()
            if rank == slow:
                time.sleep(0.3)
            error = kind(f"pruned on rank {rank}")
            assert crash.error_to_raise(error) is error
    crash.begin_fit()
    dist.barrier()
    time.sleep(GRACE + 0.3)  # what would end a rank would have ended it by now
    crash.check()
    assert process_exit.outcome.forced_exit is None
    dist.barrier()  # all have looked
    error = ValueError("pruned in the last fit")
    assert crash.error_to_raise(error) is error
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
    return str(raised), seconds, process_exit.ending_of(raised).replaces


def test_a_rank_whose_rank_0_is_frozen_prints_its_own_error() -> None:
    outcomes = run_ranks_raw(2, raise_beside_a_frozen_rank, timeout=60)
    text, seconds, is_quiet = outcomes[1].value
    assert outcomes[0].signal == signal.SIGKILL
    assert text == "boom beside a frozen rank" and seconds < 10 and not is_quiet


def printed() -> None:
    """Print an error of all ranks, then other lines."""
    crash = propagation(8.0)
    error = crash.error_to_raise(ConfigurationError(["no batch", "no model"]))
    sys.excepthook(type(error), error, None)
    if dist.get_rank() == 0:
        print("a line that was under way", file=sys.stderr)
        process_exit.outcome.lines_followed = True
    process_exit.outcome.repeat_headline()
    print("--", file=sys.stderr)


def test_an_error_of_all_ranks_is_printed_once() -> None:
    outcomes = run_ranks_raw(2, printed, timeout=60)
    said, quiet = (outcome.stderr.partition("--\n")[0].rstrip() for outcome in outcomes)
    *before, last = said.splitlines()
    assert re.match(r"rank [01] of 2 \(host .*\) failed at step 7: ConfigurationError: ", last), said
    assert not any("of 2 (host" in line for line in before), "the error itself is its message alone"
    assert "ConfigurationError" not in quiet
