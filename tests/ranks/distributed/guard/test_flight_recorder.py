"""What torch's own recorder says of the collectives of real process groups."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lightning_lockstep.distributed.guard.rank_state import FlightRecorder, Outstanding
from tests.harness import run_ranks


def a_call_that_waits_beside_a_busy_group() -> list[list[Outstanding]]:
    """What is outstanding on rank 0, look by look, until rank 1 reaches a collective of the default group."""
    recorder, looks = FlightRecorder(), []
    busy, store = dist.new_group([0, 1]), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["looked"])
    pending = [dist.all_reduce(torch.ones(2), async_op=True)]
    for _ in range(4):
        pending.append(dist.all_reduce(torch.ones(2), group=busy, async_op=True))
        looks.append(list(recorder.outstanding()))
    store.set("looked", "")
    for one in pending:
        one.wait()
    dist.destroy_process_group(busy)
    while recorder.outstanding():  # a thread of gloo notes that a call is complete, a moment later
        time.sleep(0.01)
    return looks


def test_a_call_that_waits_is_seen_beside_a_group_that_is_busy() -> None:
    waits, _ = run_ranks(2, a_call_that_waits_beside_a_busy_group, env={"TORCH_FR_BUFFER_SIZE": "512"}, timeout=60)
    assert waits[0] == [], "what was called since the last look is left out"
    (seen,) = waits[1]
    assert seen.group == "world"
    assert waits[2:] == [[seen], [seen]]
