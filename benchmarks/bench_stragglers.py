"""Step time with StragglerMonitor over the same without it, 2 ranks, CPU, an MLP of 1 M parameters."""

from __future__ import annotations

from benchmarks._fit import Job, in_ranks
from benchmarks.engine import Comparison, Report, interleave

WITHOUT, WITH = "lockstep_ddp", "with StragglerMonitor"


def run(quick: bool) -> Report:
    """Both in turn, in fresh processes."""
    steps = 150 if quick else 600
    jobs = {
        WITHOUT: Job("lockstep_ddp", "1 M", steps),
        WITH: Job("lockstep_ddp", "1 M", steps, callbacks=("StragglerMonitor",)),
    }
    samples = interleave(
        {name: lambda job=job: in_ranks(job, "mean") for name, job in jobs.items()},  # type: ignore[misc]
        rounds=2 if quick else 9,
        progress=lambda line: print(line, flush=True),
    )
    title = "step time, 1 M parameters, batch 32 per rank, 1 thread per rank"
    table = Comparison(title, samples, peer=WITHOUT, at_most={WITH: 1.01})
    notes = ["Each sample is the mean step of a run of its own in two fresh processes."]
    return Report("Step time with StragglerMonitor over without, 2 ranks", [table], notes)
