"""LockstepFSDPStrategy over a fully_shard loop, 2 ranks, CPU: step and memory; Lightning's own, ZeRO-3, DDP."""

from __future__ import annotations

import statistics

from benchmarks import _fsdp_job as job
from benchmarks._fsdp_job import LARGE, OURS, PEER, SMALL, VARIANTS
from benchmarks.engine import Comparison, Report, Samples, Table
from benchmarks.turns import in_turn
from tests.helpers import run_ranks

MIB = 2**20


def parameters(size: tuple[int, int]) -> int:
    return sum(parameter.numel() for parameter in job.Transformer(*size).parameters())


def step_time(processes: int, turns: int) -> Comparison:
    samples: Samples = {name: [] for name in VARIANTS}
    for number in range(processes):
        print(f"step: processes {number + 1}/{processes}", flush=True)
        found = in_turn(job.train_in_turn, list(VARIANTS), ranks=2, steps=4, turns=turns)
        for name, seconds in found.items():
            samples[name] += seconds
    title = f"step, {parameters(SMALL) / 1e6:.1f} M parameters, {job.BATCH} x {job.CONTEXT} bytes per rank, 1 thread"
    return Comparison(title, samples, peer=PEER, at_most={OURS: 1.03})


def peak(name: str) -> int:
    """Of one fresh pair of ranks."""
    of_ranks: list[int] = run_ranks(
        2, job.peak, name, 8, backend=None, timeout=240, env={"OMP_NUM_THREADS": "1"}
    )
    return max(of_ranks)


def memory(rounds: int) -> Table:
    count = parameters(LARGE)
    layer = sum(parameter.numel() for parameter in job.Layer(LARGE[0]).parameters())
    # Weights, gradients and two moments of AdamW, 4 bytes each; what is gathered at once: a layer and its gradient.
    formula = {"lockstep_ddp": 16 * count, OURS: 16 * count // 2 + 2 * 4 * layer}
    found = {name: statistics.median(peak(name) for _ in range(rounds)) for name in VARIANTS}
    rows = [
        [
            name,
            f"{value / MIB:.0f}",
            f"{value / found[PEER]:.3f}",
            f"{formula[name] / MIB:.0f}" if name in formula else "",
        ]
        for name, value in found.items()
    ]
    print(f"memory: {rows}", flush=True)
    return Table(
        f"peak memory of a rank above its start, {count / 1e6:.1f} M parameters float32, AdamW; goal of {OURS}: 1.02",
        ["", "MiB", f"over {PEER}", "formula (states alone) [MiB]"],
        rows,
    )


def run(quick: bool) -> Report:
    """Step time of all variants in turn, and memory."""
    steps = step_time(1, 2) if quick else step_time(4, 24)
    tables: list[Comparison | Table] = [steps, memory(1 if quick else 3)]
    notes = [
        "All variants are alive at once, each on two ranks, and make 4 steps in turn; a sample is a turn, and there"
        " are 24 of them in each of 4 sets of processes. They have the same model, data and optimizer, and those that"
        " divide it the same units: a layer each.",
        "Memory is the highest resident size of the process less that before the model is made, after a run of a small"
        " model: so it has the whole model that every rank makes at first, activations and batches, and not what"
        " a process loads once.",
    ]
    return Report("LockstepFSDPStrategy over a fully_shard loop, 2 ranks, gloo", tables, notes)
