"""The guard of a run on two ranks: its settings, what it knows of messages, and that data counts as progress."""

from __future__ import annotations

import sys
import threading
from itertools import count
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_lockstep.distributed import Gather, current_communicator
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.guard.guard import CollectiveGuard, GuardSettings, guard_on
from lightning_lockstep.errors import ConfigurationError
from tests.harness import run_ranks


def two_guards() -> tuple[str, list[str]]:
    """Another guard on each rank; then the same, of three kinds one after the other."""
    channel = current_communicator().side_channel
    propagation, meet, begun = propagation_on(channel), Gather(channel, "meet"), count()

    def begin(kind: Any) -> CollectiveGuard | None:
        propagation.enter()
        guards = meet.collect(next(begun), kind).complete("the guard")  # no collective: each may have another one
        return guard_on(channel, propagation, GuardSettings(guard=kind), of_ranks=guards)

    error = ""
    try:
        begin("watch" if channel.rank else "verify")
    except ConfigurationError as raised:
        error = str(raised)
    kinds: list[Any] = ["watch", "verify", "watch", "off"]
    sums = []
    for kind in kinds:
        guard = begin(kind)
        assert (guard is None) == (kind == "off")
        assert begin(kind) is guard
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        sums.append(str(tensor.tolist()))
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("lockstep-guard") <= 2, "one that was stopped may still be on its way out"
    return error, sums


def written_by_gloo(count: int) -> float:
    """How much more this process has written, by the counters of its system, once it has reduced this many bytes."""
    if sys.platform != "linux":  # other systems do not count it
        return float(count)
    before = psutil.Process().io_counters().write_chars
    dist.all_reduce(torch.ones(count // 4))
    return float(psutil.Process().io_counters().write_chars - before)


def cases() -> dict[str, Any]:
    return {
        "guards": two_guards(),
        "written": written_by_gloo(4 << 20),
    }


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(2, cases, timeout=60)


def test_all_ranks_have_the_same_guard_and_may_change_it_between_fits(seen: list[dict[str, Any]]) -> None:
    errors, sums = zip(*(one["guards"] for one in seen), strict=True)
    assert sums[0] == sums[1] == ["[2.0, 2.0]"] * 4
    told = errors[0]
    assert told == errors[1]
    assert "guard='verify' on rank 0 and 'watch' on rank 1: expected the same" in told and "LOCKSTEP_DEBUG" in told


def test_data_of_gloo_counts_as_written(seen: list[dict[str, Any]]) -> None:
    assert min(one["written"] for one in seen) > 1 << 20
