"""All ranks leave after the same step: late, ahead, dead, or two asking at once."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from lightning_lockstep import check_breakpoint, set_breakpoint
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.coordination.stop_agreement import StepAgreement
from tests.harness import run_ranks, run_ranks_raw


def loop(agreement: StepAgreement, steps: int, act, pause: float = 0.002) -> int:
    """Run steps until all leave; returns how many were done."""
    for step in range(1, steps + 1):
        act(step)
        time.sleep(pause)
        if agreement.passed():
            return step
    return -1


def several_cases() -> dict[str, tuple[int, str | None]]:
    rank, channel = dist.get_rank(), current_communicator().side_channel
    ended: dict[str, tuple[int, str | None]] = {}

    def case(name: str, act, *, pause: float = 0.002, steps: int = 2000) -> None:
        agreement = StepAgreement(channel, name=name)
        dist.barrier()
        left = loop(agreement, steps, act, pause)
        ended[name] = (left, agreement.decision.reason if agreement.decision else None)
        agreement.close()

    def asks(agreement_name: str, who: tuple[int, ...], at: int):
        def act(step: int) -> None:
            if rank in who and step == at:
                channel.post(f"agree/{agreement_name}", ["request", "breakpoint", f"asked by {rank}"], to=0)

        return act

    case("one asks", asks("one asks", (1,), 7))
    case("rank 0 asks", asks("rank 0 asks", (0,), 7))
    case("two ask at once", asks("two ask at once", (1, 2), 7))
    # rank 1 is late: its steps take 30 times as long, and nothing but the agreement holds the others back
    case("one is late", asks("one is late", (2,), 5), pause=0.03 if rank == 1 else 0.001)
    # rank 2 has run far ahead before anybody asks
    case("one is ahead", asks("one is ahead", (1,), 5), pause=0.0005 if rank == 2 else 0.02)
    case("nobody asks", lambda step: None, steps=50)
    return ended


def own_loop() -> list:
    """The public functions, in a loop without a Trainer; the request comes before the ranks are connected."""
    rank, out = dist.get_rank(), []
    if rank == 1:
        set_breakpoint("early bird")
    for round_ in range(2):
        for step in range(1, 500):
            time.sleep(0.002)
            if round_ == 1 and rank == 0 and step == 9:
                threading.Thread(target=set_breakpoint, args=("from a thread",)).start()
            if found := check_breakpoint(reset=True):
                out.append((step, found.reason))
                break
    return out


def own_loop_and_several_cases() -> tuple[list, dict[str, tuple[int, str | None]]]:
    return own_loop(), several_cases()


@pytest.fixture(scope="module")
def seen() -> list:
    return run_ranks(3, own_loop_and_several_cases, timeout=90)


def test_all_leave_after_the_same_step(seen):
    values = [of_rank[1] for of_rank in seen]
    assert values[0] == values[1] == values[2]
    ended = values[0]
    for name in ("one asks", "rank 0 asks", "two ask at once", "one is late", "one is ahead"):
        assert ended[name][0] >= 5, name
    assert ended["nobody asks"] == (-1, None)
    assert ended["one asks"][1] == "rank 1: asked by 1"
    assert "asked by" in ended["two ask at once"][1]
    assert ended["one is ahead"][0] > 20, "the step on which they agree lies behind the rank that is ahead"


def test_the_public_functions_in_a_loop_of_ones_own(seen):
    values = [of_rank[0] for of_rank in seen]
    assert values[0] == values[1] == values[2]
    assert [reason for _, reason in values[0]] == ["rank 1: early bird", "rank 0: from a thread"]


def one_is_dead() -> tuple[int, float]:
    rank, channel = dist.get_rank(), current_communicator().side_channel
    agreement = StepAgreement(channel, timeout=2.0)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    left = loop(agreement, 3000, lambda step: agreement.request("x") if rank == 1 and step == 7 else None)
    return left, time.monotonic() - began


def test_a_dead_rank_does_not_keep_the_others():
    outcomes = run_ranks_raw(3, one_is_dead, timeout=60)
    steps = [o.value[0] for o in outcomes[:2]]
    assert steps[0] == steps[1] > 0


@pytest.mark.parametrize("reset", [False, True])
def test_a_breakpoint_is_returned_until_it_is_reset(reset):
    assert check_breakpoint(reset=True) is None
    set_breakpoint("here")
    assert check_breakpoint(reset=reset).reason == "rank 0: here"
    assert (check_breakpoint(reset=True) is None) is reset
