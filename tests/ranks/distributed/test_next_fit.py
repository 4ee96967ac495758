"""A program that catches a failure and goes on: messages of an earlier fit, and of a later one."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from lightning_lockstep.distributed import FailurePropagation, current_communicator
from lightning_lockstep.distributed.failure.process_exit import outcome_of
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.side_channel.channel import Post
from lightning_lockstep.errors import ConfigurationError, RankFailedError
from tests.helpers import run_ranks, run_ranks_raw

GRACE = 4.0
LATE = 1.5


def propagation() -> FailurePropagation:
    made = propagation_on(current_communicator().side_channel)
    made.grace_period = GRACE
    return made


def delay(topic: str, seconds: float) -> None:
    """Have what this rank posts to a topic leave later, as on a loaded machine or network."""
    channel = current_communicator().side_channel
    put = channel._put

    def put_later(post: Any) -> None:
        if isinstance(post, Post) and post.topic == topic:
            later = threading.Timer(seconds, put, [post])
            later.daemon = True
            later.start()
        else:
            put(post)

    channel._put = put_later  # type: ignore[method-assign]


def catch(crash: FailurePropagation, error: Exception) -> None:
    assert crash.error_to_raise(error) is error


def raise_and_go_on(ours: bool) -> str:
    """Both ranks raise alike, rank 1 first; its message reaches rank 0 in the next fit."""
    crash = propagation()
    crash.begin_fit()
    error = ConfigurationError("no") if ours else ValueError("no")
    if dist.get_rank() == 1:
        delay("failure/report", LATE)
        raising = threading.Thread(target=crash.error_to_raise, args=(error,))  # waits for rank 0
        raising.start()
        time.sleep(0.3)  # its message is under way
        dist.barrier()
        raising.join()
    else:
        dist.barrier()
        catch(crash, error)
    crash.begin_fit()
    dist.barrier()
    time.sleep(LATE + GRACE)  # it has arrived, and what it would start is over
    try:
        crash.check()
    except RankFailedError as stopped:
        return str(stopped)
    return "goes on"


@pytest.mark.parametrize("ours", [False, True])
def test_a_failure_that_arrives_after_the_program_has_caught_it_stops_nobody(ours: bool) -> None:
    assert run_ranks(2, raise_and_go_on, ours, timeout=60) == ["goes on", "goes on"]


def answered_too_late() -> list[bool]:
    """Rank 0 answers the first failure in the next fit, and the second one not at all."""
    crash, quiet = propagation(), []
    crash.grace_period = 2.0
    for attempt in range(2):
        crash.begin_fit()
        dist.barrier()
        if dist.get_rank() == 0:
            delay("failure/first", LATE if attempt == 0 else 60.0)
            dist.barrier()
            time.sleep(1.0)  # rank 1 is the first to raise
            catch(crash, ValueError("no"))
        else:
            dist.barrier()
            error = ValueError("no")
            catch(crash, error)
            quiet.append(outcome_of(error).instead is not None)
        crash.begin_fit()
        dist.barrier()
        time.sleep(LATE)
    return quiet


def test_an_answer_that_arrives_too_late_is_not_taken_for_that_to_the_next_failure() -> None:
    assert run_ranks(2, answered_too_late, timeout=60)[1] == [False, False]


def failing_early() -> str:
    """Rank 0 raises, goes on and fails for good, before rank 1 has raised the first error."""
    crash = propagation()
    crash.begin_fit()
    dist.barrier()
    if dist.get_rank() == 0:
        catch(crash, ValueError("caught"))
        crash.begin_fit()
        raise crash.error_to_raise(TypeError("not caught"))
    time.sleep(1.0)
    crash.check()  # rank 0 has got over its first failure, and its second is of a later fit
    catch(crash, ValueError("caught"))
    print("caught the first one too", flush=True)
    crash.begin_fit()
    return "goes on"


def test_a_failure_in_a_fit_that_a_rank_has_not_begun_stops_it_when_it_does() -> None:
    outcomes = run_ranks_raw(2, failing_early, timeout=60)
    assert outcomes[0].exception == "TypeError: not caught"
    assert "caught the first one too" in outcomes[1].stdout
    assert (outcomes[1].exception or "").startswith("RankFailedError: rank 0 of 2")
    assert (outcomes[1].exception or "").rstrip().endswith("TypeError: not caught")
