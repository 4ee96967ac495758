"""Ranks that agree under guard="verify": every operation runs as without it, and nothing is left behind."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_lockstep.distributed.guard.verify import COMPARED, CallVerifier
from lightning_lockstep.distributed.local_collectives import OPERATIONS, local_collectives
from tests.harness import RankOutcome, run_ranks_raw
from tests.models.distributed.every_operation import GLOO_LACKS, PARTS


def alone(rank: int) -> Any:
    """Rank 1 makes a step that the others take no part in."""
    found = torch.ones(1)
    if rank == 1:
        with local_collectives():
            dist.all_reduce(found)
            dist.all_gather([torch.empty(7), torch.empty(7)], torch.ones(7))
    dist.all_reduce(found)
    return found.tolist()


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def kernels() -> list[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in OPERATIONS if has(f"c10d::{name}", "BackendSelect")]


def every_operation() -> Any:
    """Everything without the verifier and with it."""
    rank = dist.get_rank()
    plain = [part(rank) for part in PARTS]
    verifier = CallVerifier()
    before = threads_of_this_process()
    verifier.start()
    verifier.start()  # harmless
    found = [part(rank) for part in PARTS]
    with_alone = alone(rank)
    count = max(call.call.number for call in verifier.calls() if call.call.group == "world")
    assert verifier.outstanding() == [] and all(call.done for call in verifier.calls())
    known = [known for group in verifier._groups.values() if group is not None for known in group._known.values()]
    operations = {call.operation for call, _ in known}
    put = kernels()
    verifier.stop()
    verifier.stop()
    left = threads_of_this_process() - before, kernels()
    dist.barrier()
    for _ in range(3):  # over the same store, with the same names
        verifier.start()
        dist.barrier()
        verifier.stop()
    return plain == found, with_alone, operations, count, put, left


def two_threads() -> Any:
    """A group each, in other orders on each rank."""
    verifier, totals = CallVerifier(), {}
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    verifier.start()

    def work(index: int) -> None:
        total = torch.ones(1)
        for _ in range(40):
            dist.all_reduce(total, dist.ReduceOp.MAX, group=groups[index])
            dist.all_gather([torch.empty(1 + index)] * 2, torch.ones(1 + index), group=groups[index])
        totals[index] = total.item()

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads if dist.get_rank() else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    last = {call.call.group: call.call.number for call in verifier.calls()}
    verifier.stop()
    return totals, sorted(last.values())


def cases() -> dict[str, Any]:
    return {
        "operations": every_operation(),
        "threads": two_threads(),
    }


@pytest.fixture(scope="module")
def seen() -> list[RankOutcome]:
    outcomes = run_ranks_raw(2, cases, timeout=120)
    assert all(outcome.ok for outcome in outcomes), [outcome.traceback for outcome in outcomes]
    return outcomes


def test_every_operation_runs_as_without(seen: list[RankOutcome]) -> None:
    for outcome in seen:
        same, with_alone, operations, count, put, left = outcome.value["operations"]
        assert same and with_alone == [3.0] and count > len(COMPARED)
        assert operations == {OPERATIONS[name] for name in COMPARED} - GLOO_LACKS
        assert put == [name for name in OPERATIONS if name in COMPARED]
        assert left == (0, [])


def test_threads_with_groups_of_their_own(seen: list[RankOutcome]) -> None:
    assert [outcome.value["threads"] for outcome in seen] == [({0: 1.0, 1: 1.0}, [80, 80])] * 2
