"""Step time of lockstep_ddp over Lightning's ddp, 2 ranks, CPU, MLPs of 1 M and 10 M parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks._fit import Job
from benchmarks.engine import Comparison, Report, interleave
from benchmarks.ranks import as_script, in_ranks

PEER, OURS = "ddp", "lockstep_ddp"


def compare(title: str, job: Job, rounds: int, start: Callable[[Job], dict[str, Any]]) -> Comparison:
    """Both strategies in turn on one job."""

    def one(strategy: str) -> float:
        return float(start(dataclasses.replace(job, strategy=strategy))["seconds"])

    samples = interleave(
        {PEER: lambda: one(PEER), OURS: lambda: one(OURS)},
        rounds=rounds,
        progress=lambda line: print(f"{title}: {line}", flush=True),
    )
    return Comparison(title, samples, peer=PEER, at_most={OURS: 1.0})


def default_threads(strategy: str) -> int:
    """CPU threads that a rank has when a script says nothing about threads."""
    return int(as_script(Job(strategy, "tiny", steps=4, batch=4))["threads"])


def run(quick: bool) -> Report:
    jobs = {"1 M": Job(PEER, "1 M", steps=150, threads=1), "10 M": Job(PEER, "10 M", steps=30, threads=1)}
    rounds = 2 if quick else 7
    tables = [
        compare(f"{name} parameters, batch 32 per rank, 1 thread per rank in both", job, rounds, in_ranks)
        for name, job in jobs.items()
    ]
    ours, theirs = default_threads(OURS), default_threads(PEER)
    notes = [
        "Each sample is the median step of a run of its own in two fresh processes.",
        "Both with their other defaults: ours keeps gradients in the buckets (gradient_as_bucket_view) and"
        " does not broadcast before every batch.",
        f"Threads per rank by default on this machine: {PEER} {theirs}, {OURS} {ours}.",
    ]
    if ours != theirs:
        for name, job in jobs.items():
            title = f"{name} parameters, batch 32 per rank, each with its own default of threads"
            tables.append(compare(title, dataclasses.replace(job, threads=None), min(rounds, 3), as_script))
    return Report("Step time of lockstep_ddp over ddp, 2 ranks", tables, notes)
