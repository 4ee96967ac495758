"""An all-reduce with guard="verify" over one with torch's TORCH_DISTRIBUTED_DEBUG=DETAIL, 2 ranks, gloo."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.engine import Comparison, Report, Samples, interleave
from lightning_lockstep.distributed.guard.verify import CallVerifier
from tests.harness import chosen_device, run_ranks, wait_for_device

PLAIN, VERIFY, DETAIL = "plain", "verify", "DETAIL"


def median_call(calls: int) -> float:
    """Seconds of an all-reduce, the median of many, each after a barrier."""
    tensor, found = torch.ones(8, device=chosen_device()), []
    for _ in range(3 + calls):
        dist.barrier()
        wait_for_device()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        wait_for_device()
        found.append(time.perf_counter() - started)
    return statistics.median(found[3:])  # the connections of the verifier are made at the first collective


def in_rank(variant: str, calls: int) -> float:
    """One sample in a process of its own, which is what DETAIL needs."""
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()  # read at import, and this process is forked from one that has imported torch
    dist.init_process_group("gloo")
    verifier = CallVerifier() if variant == VERIFY else None
    try:
        assert (dist.get_debug_level() == dist.DebugLevel.DETAIL) == (variant == DETAIL)
        if verifier is not None:
            verifier.start()
        return median_call(calls)
    finally:
        if verifier is not None:
            verifier.stop()
        dist.destroy_process_group()


def run(quick: bool) -> Report:
    """The variants, each in fresh processes, in turn."""
    calls = 30 if quick else 150

    def one(variant: str) -> float:
        env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if variant == DETAIL else None
        return float(run_ranks(2, in_rank, variant, calls, env=env, backend=None)[0])

    samples: Samples = interleave(
        {name: lambda name=name: one(name) for name in (PLAIN, VERIFY, DETAIL)},  # type: ignore[misc]
        rounds=2 if quick else 7,
        progress=lambda line: print(line, flush=True),
    )
    table = Comparison("all_reduce, 2 ranks, a process each time", samples, peer=DETAIL, at_most={VERIFY: 1.0})
    notes = ["Each sample is the median of many calls of 8 float32 values, each after a barrier."]
    return Report("guard='verify' over torch's DETAIL", [table], notes)
