"""Step time of lockstep_ddp over Lightning's ddp, 2 ranks, CPU, MLPs of 1 M and 10 M parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks._fit import Job
from benchmarks.engine import Comparison, Report, interleave
from benchmarks.ranks import as_script, in_ranks

PEER, OURS = "ddp", "lockstep_ddp"


def compare(
    title: str,
    model: str,
    rounds: int,
    steps: int,
    threads: int | None,
    start: Callable[[Job], dict[str, Any]],
) -> tuple[Comparison, dict[str, float]]:
    """Both strategies in turn; also the number of threads each ran with."""
    used: dict[str, float] = {}

    def one(strategy: str) -> float:
        result = start(Job(strategy, model, steps, threads=threads))
        used[strategy] = result["threads"]
        return float(result["seconds"])

    samples = interleave(
        {PEER: lambda: one(PEER), OURS: lambda: one(OURS)},
        rounds=rounds,
        progress=lambda line: print(f"{title}: {line}", flush=True),
    )
    return Comparison(title, samples, peer=PEER, at_most={OURS: 1.0}), used


def run(quick: bool) -> Report:
    tables = []
    notes = []
    for model, steps in (("1 M", 200), ("10 M", 60)):
        rounds, length = (2, steps // 4) if quick else (9, steps)
        title = f"{model} parameters, batch 32 a rank, 1 thread a rank in both"
        table, _ = compare(title, model, rounds, length, 1, in_ranks)
        tables.append(table)
    for model, steps in (("1 M", 200), ("10 M", 60)):
        rounds, length = (1, steps // 4) if quick else (4, steps)
        title = f"{model} parameters, batch 32 a rank, each with its own default of threads"
        table, used = compare(title, model, rounds, length, None, as_script)
        tables.append(table)
        notes.append(
            f"Threads a rank by default at {model}: {PEER} {used[PEER]:.0f}, {OURS} {used[OURS]:.0f}."
        )
    notes.append("Each sample is the median step of a run of its own in two fresh processes.")
    return Report("Step time of lockstep_ddp over ddp, 2 ranks", tables, notes)
