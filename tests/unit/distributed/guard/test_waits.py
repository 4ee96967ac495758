"""How long a rank has waited in its incomplete collectives, and when it asks about one."""

from __future__ import annotations

import pytest

from lightning_lockstep.distributed.guard.records import Outstanding
from lightning_lockstep.distributed.guard.watch import Waits

FIRST, SECOND = Outstanding("world", 7), Outstanding("of two", 1)


def unknown() -> dict[Outstanding | None, float]:
    return {}


def test_a_wait_is_asked_about_once_in_each_timeout() -> None:
    waits = Waits(10.0)
    waits.update([FIRST], 100.0, unknown)
    assert waits.due(109.0) == [] and waits.until_due(109.0) == 1.0
    assert waits.due(110.0) == [(FIRST, 10.0)]
    assert waits.due(110.0) == [] and waits.until_due(110.0) == 10.0
    assert waits.due(121.0) == [(FIRST, 21.0)]


def test_what_is_complete_is_forgotten_and_begins_anew() -> None:
    waits = Waits(10.0)
    waits.update([FIRST, None], 100.0, unknown)
    waits.update([SECOND], 105.0, unknown)
    assert waits.until_due(105.0) == 10.0
    waits.update([FIRST, SECOND], 112.0, unknown)
    assert waits.due(115.0) == [(SECOND, 10.0)]


def test_a_wait_began_when_the_collective_was_called() -> None:
    waits = Waits(10.0)
    waits.update([FIRST], 100.0, lambda: {FIRST: 3.0})
    assert waits.until_due(100.0) == 7.0
    waits.update([FIRST], 101.0, lambda: pytest.fail("asked though nothing is new"))
    assert waits.due(107.0) == [(FIRST, 10.0)]


def test_a_time_in_which_the_process_was_stopped_is_no_wait() -> None:
    waits = Waits(10.0)
    waits.update([FIRST], 100.0, unknown)
    waits.put_off(60.0)
    assert waits.until_due(165.0) == 5.0 and waits.due(165.0) == []


def test_without_waits_nothing_is_due() -> None:
    waits = Waits(10.0)
    assert waits.due(1e9) == [] and waits.until_due(0.0) == float("inf")
