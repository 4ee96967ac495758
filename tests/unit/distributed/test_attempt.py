"""Which failure ends an attempt, without processes: messages and failures in an order in which they seldom come."""

from __future__ import annotations

import pytest

from lightning_lockstep.distributed import Message, SideChannel
from lightning_lockstep.distributed.failure.attempt import Attempt
from lightning_lockstep.distributed.failure.record import FailureRecord, describe_error, describe_exit
from lightning_lockstep.errors import CollectiveMismatchError

KILLED = describe_exit(2, 3, 1234, -9)


def attempt(rank: int) -> Attempt:
    """Return the attempt of a rank of 3, which has entered the first one."""
    made = Attempt(SideChannel(rank, 3))
    made.enter()
    return made


def arrives(at: Attempt, number: int, record: FailureRecord) -> None:
    at.channel._deliver(Message("failure", 0, [number, record.to_json()]))


def test_a_failure_of_a_later_attempt_waits_until_it_is_entered_and_one_of_an_earlier_is_kept() -> None:
    boom, late = (describe_error(ValueError(text), 2, 3) for text in ("boom", "too late"))
    one = attempt(1)
    arrives(one, 2, boom)
    assert (one.state, one.has_failure) == ("running", False)
    one.enter()
    assert (one.state, one.record) == ("failed", boom)
    one.leave()
    arrives(one, 1, late)
    assert one.record == boom


def test_the_first_failure_counts_and_the_end_of_a_process_is_one_of_each_later_attempt() -> None:
    zero, heard = attempt(0), list[FailureRecord]()
    zero.on_failure = heard.append
    first = zero.fail(ValueError("boom"))
    assert (first.rank, zero.state, heard) == (0, "raised", [first])
    arrives(zero, 1, describe_error(KeyError("later"), 1, 3))
    assert zero.fail(OSError("while it was saved")) == first
    zero.leave()
    zero.enter()
    assert zero.state == "running"
    assert zero.report_child_exit(2, -9, 1234).summary == "killed by SIGKILL"
    assert zero.state == "failed"
    zero.enter()
    assert zero.state == "failed" and zero.record is not None and zero.record.rank == 2


def test_a_process_that_ends_after_its_rank_has_raised_is_known_by_what_it_raised() -> None:
    zero = attempt(0)
    raised = describe_error(ValueError("boom"), 2, 3)
    arrives(zero, 1, raised)
    assert zero.report_child_exit(2, 1, 1234) == raised
    zero.enter()
    assert zero.record == raised


def test_a_diagnosis_applies_to_a_rank_that_is_one_attempt_ahead_of_rank_0() -> None:
    one = attempt(1)
    one.leave()
    one.enter()
    diagnosis = describe_error(CollectiveMismatchError("rank 0 never came"), 0, 3)
    arrives(one, 1, FailureRecord(**{**vars(diagnosis), "kind": "collective"}))
    assert one.state == "failed"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_the_others_outlive_ends_every_attempt(rank: int) -> None:
    made = attempt(rank)
    made.outlive(KILLED)
    assert (made.state, made.record, made.is_outlived) == ("failed", KILLED, True)
    made.enter()
    assert made.state == "failed"
