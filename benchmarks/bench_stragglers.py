"""Step time with StragglerMonitor over the same without it, 2 ranks, CPU, an MLP of 1 M parameters."""

from __future__ import annotations

import dataclasses

from benchmarks._fit import Job
from benchmarks.engine import Comparison, Report, interleave
from benchmarks.ranks import in_ranks

WITHOUT, WITH = "lockstep_ddp", "with StragglerMonitor"


def run(quick: bool) -> Report:
    """Both in turn, in fresh processes."""
    # Long enough for several questions of rank 0, each of which stops a rank for some milliseconds.
    plain = Job("lockstep_ddp", "1 M", steps=150 if quick else 600, threads=1)
    jobs = {WITHOUT: plain, WITH: dataclasses.replace(plain, callbacks=("StragglerMonitor",))}
    processor: dict[str, list[float]] = {name: [] for name in jobs}

    def one(name: str) -> float:
        measured = in_ranks(jobs[name])
        processor[name].append(float(measured["processor"]))
        return float(measured["mean"])

    samples = interleave(
        {name: lambda name=name: one(name) for name in jobs},  # type: ignore[misc]
        rounds=2 if quick else 9,
        progress=lambda line: print(line, flush=True),
    )
    what = "1 M parameters, batch 32 per rank, 1 thread per rank"
    tables = [
        Comparison(f"step time, {what}", samples, peer=WITHOUT, at_most={WITH: 1.01}),
        Comparison(f"processor time of rank 0 a step, {what}", processor, peer=WITHOUT),
    ]
    notes = [
        "Each sample is the mean step of a run of its own in two fresh processes, since what the monitor costs comes"
        " in a few steps: rank 0 asks after 50 steps or more, and reading the flight recorder then takes some"
        " milliseconds.",
        "Processor time is that of all threads; other programs on the machine change it little.",
    ]
    return Report("Step time with StragglerMonitor over without, 2 ranks", tables, notes)
