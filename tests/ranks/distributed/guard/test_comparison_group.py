"""What ranks compare over before a collective, and what ends a wait there."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch.distributed as dist

from lightning_lockstep.distributed.failure.record import is_broken_collective
from lightning_lockstep.distributed.guard.activity import connections, end_connections
from lightning_lockstep.distributed.guard.verify import ComparisonGroup
from tests.helpers import run_ranks, run_ranks_raw


def made(timeout: float = 30.0) -> ComparisonGroup:
    store = dist.distributed_c10d._get_default_store()
    return ComparisonGroup(store, dist.get_rank(), dist.get_world_size(), timeout=timeout)


def compares() -> list[object]:
    group, rank, size = made(), dist.get_rank(), dist.get_world_size()
    others_differ = [group.all_equal(8 if rank == other else 7, 20.0) for other in range(size)]
    sent, expected = [rank + other for other in range(size)], [rank + other for other in range(size)]
    return [
        group.all_equal(2**63 - 1, 20.0),
        group.all_equal(0, 20.0),
        any(others_differ),
        group.all_equal(rank, 20.0),
        group.fits(sent, expected, 20.0),
        group.fits(sent, [*expected[:-1], 0], 20.0),
        group.fits(sent if rank else sent[:-1], expected, 20.0),
        group.fits([0, *sent], [0, *expected], 20.0),
        group.exchange(bytes(rank)),
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_ranks_find_out_together_whether_they_agree(size: int) -> None:
    texts = [bytes(rank) for rank in range(size)]
    expected = [True, True, False, False, True, False, False, False, texts]
    assert run_ranks(size, compares, timeout=60) == [expected] * size


def late_by_turns() -> list[bool]:
    """Comparisons in which another rank comes late each time; nobody may take an answer of the one before."""
    group, rank, size = made(), dist.get_rank(), dist.get_world_size()
    found = []
    for number in range(30):
        if number % size == rank:
            time.sleep(0.01)
        found.append(group.all_equal(number if number % 5 or rank != number % size else -1, 20.0))
    return found


def test_one_comparison_is_not_taken_for_another() -> None:
    assert run_ranks(3, late_by_turns, timeout=60) == [[bool(number % 5) for number in range(30)]] * 3


def waits(case: str) -> str:
    before = set(connections())
    group = made()
    own = set(connections()) - before
    if dist.get_rank() == 1:
        if case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3.0)
        return "left"
    if case == "ended":
        threading.Timer(0.3, end_connections, [own]).start()
    try:
        group.all_equal(1, 1.0 if case == "late" else 60.0)
    except RuntimeError as error:
        return str(error) if is_broken_collective(error) else f"not taken for one of a backend: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("killed", "Connection (closed|reset) by peer"),
        ("late", "Timed out waiting 1000ms"),
        ("ended", "Connection closed by peer"),
    ],
)
def test_a_wait_ends_when_the_other_rank_is_gone_is_late_or_the_guard_ends_it(
    case: str, expected: str
) -> None:
    outcomes = run_ranks_raw(2, waits, case, timeout=60)
    assert re.search(expected, outcomes[0].value)


def test_nobody_waits_for_ever_for_a_rank_that_makes_none() -> None:
    with pytest.raises(dist.DistStoreError, match=r"Timed out after 0\.2 s: 1 of 2 ranks have not called"):
        ComparisonGroup(dist.HashStore(), 0, 2, timeout=0.2)
