"""LockstepDeepSpeedStrategy over DeepSpeed's engine alone, 2 ranks, CPU: step time, and memory by stage of ZeRO."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

from benchmarks import _deepspeed_job as job
from benchmarks._fit import WIDTHS
from benchmarks.engine import Comparison, Report, Table, interleave
from tests.helpers import run_ranks

PEER, OURS, WATCHED = "deepspeed.initialize", "lockstep_deepspeed", "with OverflowDetector"
VARIANTS: dict[str, Callable[..., dict[str, float]]] = {PEER: job.bare, OURS: job.ours}
PROGRAMS = {**VARIANTS, WATCHED: job.watched}
# 40 M parameters: states of some hundred MiB, beside which what the libraries take is little.
LARGE = [2048, 6144, 4096, 512]
MIB = 2**20


def one(name: str, widths: list[int], stage: int, steps: int, what: str) -> float:
    """One fresh pair of ranks."""
    found = run_ranks(
        2, PROGRAMS[name], widths, stage, steps, backend=None, timeout=240, env={"OMP_NUM_THREADS": "1"}
    )
    return max(float(of_rank[what]) for of_rank in found)


def step_time(stage: int, rounds: int, steps: int) -> Comparison:
    title = f"step, stage {stage}, 10 M parameters, batch {job.BATCH} per rank, 1 thread per rank"
    samples = interleaved([PEER, OURS], stage, rounds, steps)
    return Comparison(title, samples, peer=PEER, at_most={OURS: 1.02})


def detector(stage: int, rounds: int, steps: int) -> Comparison:
    title = f"step with OverflowDetector over without, stage {stage}, 10 M parameters"
    samples = interleaved([OURS, WATCHED], stage, rounds, steps)
    return Comparison(title, samples, peer=OURS, at_most={WATCHED: 1.03})


def interleaved(names: list[str], stage: int, rounds: int, steps: int) -> dict[str, list[float]]:
    return interleave(
        {name: lambda name=name: one(name, WIDTHS["10 M"], stage, steps, "seconds") for name in names},  # type: ignore[misc]
        rounds=rounds,
        progress=lambda line: print(f"stage {stage}: {line}", flush=True),
    )


def memory(rounds: int) -> Table:
    parameters = sum(a * b + b for a, b in itertools.pairwise(LARGE))
    rows = []
    for stage in (0, 1, 2, 3):
        found = {
            name: statistics.median(one(name, LARGE, stage, 8, "bytes") for _ in range(rounds))
            for name in VARIANTS
        }
        rows.append([f"{stage}", *(f"{found[name] / MIB:.0f}" for name in VARIANTS)])
        print(f"memory, stage {stage}: {rows[-1]}", flush=True)
    return Table(
        f"peak memory of a rank above its start [MiB], {parameters / 1e6:.1f} M parameters in float32, AdamW",
        ["stage", *VARIANTS],
        rows,
    )


def run(quick: bool) -> Report:
    """Step time of stages 1 and 2, also with OverflowDetector in 2 and 3, memory of all stages."""
    rounds, steps = (2, 15) if quick else (7, 30)
    tables: list[Comparison | Table] = [step_time(stage, rounds, steps) for stage in (1, 2)]
    tables += [detector(stage, rounds, steps) for stage in (2, 3)]
    tables.append(memory(1 if quick else 3))
    notes = [
        "Each sample is the median step of a run of its own in two fresh processes; both variants have the same"
        " configuration, model, data and optimizer.",
        "Memory is the highest resident size of the process less that before the model is made, so it has the"
        " activations, the batches, the whole model that every rank makes at first, and what the libraries allocate"
        " meanwhile.",
    ]
    return Report("LockstepDeepSpeedStrategy over deepspeed.initialize, 2 ranks, gloo", tables, notes)
