"""Step time of lockstep_ddp over ddp and with num_items, 2 ranks, CPU, MLPs of 1 M and 10 M parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks._fit import Job, fit
from benchmarks.engine import Comparison, Report, interleave
from benchmarks.ranks import as_script, in_ranks
from benchmarks.turns import Turns, in_turn

PEER, OURS, ITEMS = "ddp", "lockstep_ddp", "with num_items"


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


def train_in_turn(model: str, turns: Turns) -> None:
    """Train with or without ``num_items``, as the name of the turn says."""
    fit(Job(OURS, model, turns.total, threads=1, counts_items=turns.name == ITEMS), turns.step)


def items(model: str, steps: int, turns: int) -> Comparison:
    """Steps that count items beside steps that do not, in turn."""
    samples = in_turn(partial(train_in_turn, model), [OURS, ITEMS], ranks=2, steps=steps, turns=turns)
    title = f"{model} parameters, num_items returned, {steps} steps in each turn"
    return Comparison(title, samples, peer=OURS, at_most={ITEMS: 1.01})


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
    turns = 6 if quick else 24
    tables += [items("1 M", 20, turns), items("10 M", 4, turns)]
    ours, theirs = default_threads(OURS), default_threads(PEER)
    notes = [
        "Each sample is the median step of a run of its own in two fresh processes; with num_items the mean of a turn.",
        "Both with their other defaults: ours keeps gradients in the buckets (gradient_as_bucket_view) and"
        " does not broadcast before every batch.",
        f"Threads per rank by default on this machine: {PEER} {theirs}, {OURS} {ours}.",
    ]
    if ours != theirs:
        for name, job in jobs.items():
            title = f"{name} parameters, batch 32 per rank, each with its own default of threads"
            tables.append(compare(title, dataclasses.replace(job, threads=None), min(rounds, 3), as_script))
    return Report("Step time of lockstep_ddp over ddp, 2 ranks", tables, notes)
