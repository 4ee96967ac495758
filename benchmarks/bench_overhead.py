"""What lockstep_ddp adds to a step while nothing is wrong, in ms: a tiny model, where nothing hides it."""

from __future__ import annotations

from benchmarks._fit import Job
from benchmarks.engine import Comparison, Report, interleave
from benchmarks.ranks import in_ranks

PEER, OURS = "ddp", "lockstep_ddp"


def run(quick: bool) -> Report:
    rounds, steps = (3, 200) if quick else (9, 400)

    def one(strategy: str) -> float:
        return float(in_ranks(Job(strategy, "tiny", steps, batch=4, threads=1))["seconds"])

    samples = interleave(
        {PEER: lambda: one(PEER), OURS: lambda: one(OURS)},
        rounds=rounds,
        progress=lambda line: print(line, flush=True),
    )
    table = Comparison(
        "a step of a 544-parameter MLP, 1 thread per rank",
        samples,
        peer=PEER,
        at_most={OURS: 0.1},
        by="difference",
    )
    return Report(
        "What lockstep_ddp adds to a step, 2 ranks",
        [table],
        [f"Each sample is the median of {steps} steps in two fresh processes."],
    )
