"""Step time of lockstep_ddp over ddp, and with num_items, 2 ranks, CPU, MLPs of 1 M and 10 M parameters."""

from __future__ import annotations

from benchmarks._fit import Job, fit, in_ranks
from benchmarks.engine import Comparison, Report, Samples, interleave
from tests.harness import run_ranks

PEER, OURS = "ddp", "lockstep_ddp"
MEAN, ITEMS = "a loss", "with num_items"


def compare(model: str, steps: int, rounds: int) -> Comparison:
    """Both strategies in turn."""
    samples = interleave(
        {name: lambda name=name: in_ranks(Job(name, model, steps), "median") for name in (PEER, OURS)},  # type: ignore[misc]
        rounds=rounds,
        progress=lambda line: print(f"{model}: {line}", flush=True),
    )
    title = f"{model} parameters, batch 32 per rank, 1 thread per rank in both"
    return Comparison(title, samples, peer=PEER, at_most={OURS: 1.0})


def with_items(steps: int, rounds: int) -> Samples:
    """Both kinds of step in turn, in one group of ranks."""
    jobs = {MEAN: Job(OURS, "1 M", steps), ITEMS: Job(OURS, "1 M", steps, items=True)}
    variants = {name: lambda job=job: fit(job)["median"] for name, job in jobs.items()}  # type: ignore[misc]
    return interleave(variants, rounds=rounds, warmup=1)


def run(quick: bool) -> Report:
    rounds = 2 if quick else 7
    notes = [
        "Each sample is the median step of a run of its own in two fresh processes.",
        "Both with their other defaults: ours keeps gradients in the buckets (gradient_as_bucket_view) and"
        " does not broadcast before every batch.",
    ]
    tables = [compare("1 M", 150, rounds), compare("10 M", 30, rounds)]
    samples = run_ranks(2, with_items, 150, 2 * rounds, backend=None, timeout=600)[0]
    title = "num_items, 1 M parameters, batch 32 per rank, 1 thread per rank"
    tables.append(Comparison(title, samples, peer=MEAN, at_most={ITEMS: 1.02}))
    return Report("Step time of lockstep_ddp over ddp, 2 ranks", tables, notes)
