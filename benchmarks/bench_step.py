"""Step time of lockstep_ddp over ddp, 2 ranks, CPU, MLPs of 1 M and 10 M parameters."""

from __future__ import annotations

from benchmarks._fit import Job, in_ranks
from benchmarks.engine import Comparison, Report, interleave

PEER, OURS = "ddp", "lockstep_ddp"


def compare(model: str, steps: int, rounds: int) -> Comparison:
    """Both strategies in turn."""
    samples = interleave(
        {name: lambda name=name: in_ranks(Job(name, model, steps), "median") for name in (PEER, OURS)},  # type: ignore[misc]
        rounds=rounds,
        progress=lambda line: print(f"{model}: {line}", flush=True),
    )
    title = f"{model} parameters, batch 32 per rank, 1 thread per rank in both"
    return Comparison(title, samples, peer=PEER, at_most={OURS: 1.0})


def run(quick: bool) -> Report:
    rounds = 2 if quick else 7
    notes = [
        "Each sample is the median step of a run of its own in two fresh processes.",
        "Both with their other defaults: ours keeps gradients in the buckets (gradient_as_bucket_view) and"
        " does not broadcast before every batch.",
    ]
    tables = [compare("1 M", 150, rounds), compare("10 M", 30, rounds)]
    return Report("Step time of lockstep_ddp over ddp, 2 ranks", tables, notes)
