"""What ranks compare over before a collective, and what ends a wait there."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch.distributed as dist

from lightning_lockstep.distributed.failure.interrupt import connections, end_connections
from lightning_lockstep.distributed.failure.record import is_broken_collective
from lightning_lockstep.distributed.guard.verify import ComparisonGroup
from tests.harness import run_ranks, run_ranks_raw


def made(timeout: float = 30.0) -> ComparisonGroup:
    store = dist.distributed_c10d._get_default_store()
    return ComparisonGroup(store, dist.get_rank(), dist.get_world_size(), timeout=timeout)


def compares() -> list[object]:
    group, rank, size = made(), dist.get_rank(), dist.get_world_size()
    others_differ = [group.all_equal(8 if rank == other else 7, 20.0) for other in range(size)]
    return [
        group.all_equal(2**63 - 1, 20.0),
        group.all_equal(0, 20.0),
        any(others_differ),
        group.all_equal(rank, 20.0),
        group.exchange(bytes(rank)),
    ]


def late_by_turns() -> list[bool]:
    """Comparisons in which another rank comes late each time; nobody may take an answer of the one before."""
    group, rank, size = made(), dist.get_rank(), dist.get_world_size()
    found = []
    for number in range(30):
        if number % size == rank:
            time.sleep(0.01)
        found.append(group.all_equal(number if number % 5 or rank != number % size else -1, 20.0))
    return found


def both() -> tuple[list[object], list[bool]]:
    return compares(), late_by_turns()


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_find_out_together_whether_they_agree(size: int) -> None:
    texts = [bytes(rank) for rank in range(size)]
    agree = [True, True, False, False, texts]
    in_turn = [bool(number % 5) for number in range(30)]
    assert run_ranks(size, both, timeout=60) == [(agree, in_turn)] * size


def waits() -> list[str]:
    """Rank 1 comes late, then the connections are ended, and at last it is killed."""
    said, is_first = [], dist.get_rank() == 0
    store = dist.distributed_c10d._get_default_store()
    for case in ("late", "ended", "killed"):
        before = set(connections())
        group = made()
        own = [number for end, number in connections().items() if end not in before]
        if not is_first:
            store.wait([case]) if case != "killed" else os.kill(os.getpid(), signal.SIGKILL)
            continue
        if case == "ended":
            threading.Timer(0.3, end_connections, [own]).start()
        try:
            group.all_equal(1, 1.0 if case == "late" else 60.0)
            said.append("no error")
        except RuntimeError as error:
            said.append(
                str(error) if is_broken_collective(error) else f"not taken for one of a backend: {error}"
            )
        if case != "killed":
            store.set(case, "")
    return said


def test_a_wait_ends_when_the_other_rank_is_late_is_gone_or_the_guard_ends_it() -> None:
    outcomes = run_ranks_raw(2, waits, timeout=60)
    late, ended, killed = outcomes[0].value
    assert "Timed out waiting 1000ms" in late
    assert "Connection closed by peer" in ended
    assert re.search("Connection (closed|reset) by peer", killed)


def comes_again() -> list[object]:
    """Rank 0 comes too early, catches the timeout and comes again; rank 1 comes for the second time only."""
    said: list[object] = []
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            made(0.3)
        except dist.DistStoreError as error:
            said.append("1 of 2 ranks have not called" in str(error))
        store.set("timed out", "")
    store.wait(["timed out"])
    for late in (0, 1):
        time.sleep(0.3 * (dist.get_rank() == late))
        said.append(made(5.0).all_equal(7, 5.0))
    return said


def test_a_rank_that_has_timed_out_and_comes_again_counts_once() -> None:
    assert run_ranks(2, comes_again, timeout=60) == [[True, True, True], [True, True]]


def test_nobody_waits_for_ever_for_a_rank_that_makes_none() -> None:
    with pytest.raises(dist.DistStoreError, match=r"Timed out after 0\.2 s: 1 of 2 ranks have not called"):
        ComparisonGroup(dist.HashStore(), 0, 2, timeout=0.2)
