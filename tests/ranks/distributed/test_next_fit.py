"""A program that catches a failure and goes on: messages of an earlier fit, and of a later one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_lockstep.distributed import FailurePropagation, current_communicator
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.side_channel.channel import Post
from lightning_lockstep.errors import ConfigurationError, RankFailedError
from tests.helpers import run_ranks, run_ranks_raw

GRACE = 1.5


def propagation(grace: float) -> FailurePropagation:
    made = propagation_on(current_communicator().side_channel)
    made.grace_period = grace
    return made


def catch(crash: FailurePropagation, error: Exception) -> None:
    assert crash.error_to_raise(error) is error


def hold_reports(put: Callable[[Any], None], held: list[Any], post: Any) -> None:
    if isinstance(post, Post) and post.topic == "failure/report":
        held.append(post)
        post = Post("has reported", None, 0, None)
    put(post)


def raise_and_go_on() -> list[str]:
    """Both ranks raise alike; the report of rank 1 reaches rank 0 in the next fit."""
    crash, ended = propagation(GRACE), []
    channel = crash.channel
    put, held = channel._put, list[Any]()
    reported, arrived = threading.Event(), threading.Event()
    channel.on("has reported", lambda message: reported.set())
    channel.on("after the report", lambda message: arrived.set())
    for error in (ValueError("no"), ConfigurationError("no")):
        crash.begin_fit()
        dist.barrier()
        if channel.rank == 1:
            channel._put = partial(hold_reports, put, held)  # type: ignore[method-assign]
        else:
            assert reported.wait(20)  # else rank 1 may hear of this rank's error first, and report none
            reported.clear()
        catch(crash, error)
        crash.begin_fit()
        dist.barrier()
        if channel.rank == 1:
            channel._put = put  # type: ignore[method-assign]
            assert held, "rank 1 has reported"
            put(held.pop())
            channel.post("after the report", to=0)
        else:
            assert arrived.wait(20)
            arrived.clear()
        dist.barrier()
        time.sleep(GRACE)  # what the report would start is over
        try:
            crash.check()
            ended.append("goes on")
        except RankFailedError as stopped:
            ended.append(str(stopped))
    return ended


def test_a_failure_that_arrives_after_the_program_has_caught_it_stops_nobody() -> None:
    assert run_ranks(2, raise_and_go_on, timeout=60) == [["goes on"] * 2] * 2


def failing_early() -> str:
    """Rank 0 raises, goes on and fails for good, before rank 1 has raised the first error."""
    crash = propagation(4.0)
    crash.begin_fit()
    dist.barrier()
    if dist.get_rank() == 0:
        catch(crash, ValueError("caught"))
        crash.begin_fit()
        raise crash.error_to_raise(TypeError("not caught"))
    end = time.monotonic() + 20
    while crash._told is None or not crash._told.record.summary.startswith("TypeError"):
        assert time.monotonic() < end, "nothing is heard of the second failure"
        time.sleep(0.01)
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
