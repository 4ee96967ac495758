"""Ends of processes in which a thread of gloo is not done yet."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_lockstep.distributed import current_communicator
from tests.harness import run_ranks_raw

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are slowed down as Linux allows")
KEPT: list[object] = []


def end_before_gloo() -> None:
    """End right after a collective, on one core, with gloo's threads so slow that they are not done."""
    # Something of the program holds the group, as DDP's reducer does, or its destruction would wait for the threads.
    KEPT.append(dist.group.WORLD)
    assert current_communicator().world_size == 2
    dist.barrier()
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), {min(os.sched_getaffinity(0))})
        if (task / "comm").read_text().startswith("pt_gloo"):
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))

    def reduce() -> None:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)

    reduce()


def test_a_rank_that_has_done_its_work_is_not_aborted_by_a_thread_of_gloo():
    assert [outcome.returncode for outcome in run_ranks_raw(2, end_before_gloo)] == [0, 0]
