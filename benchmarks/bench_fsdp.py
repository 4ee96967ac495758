"""LockstepFSDPStrategy over a fully_shard loop, 2 ranks, CPU: step and memory; Lightning's own, ZeRO-3, DDP."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks import _fsdp_job as job
from benchmarks.engine import Comparison, Report, Table, interleave
from tests.helpers import run_ranks

PEER, OURS = "fully_shard", "lockstep_fsdp"
VARIANTS: dict[str, Callable[..., dict[str, float]]] = {
    PEER: job.bare,
    OURS: job.ours,
    "ModelParallelStrategy": job.lightning,
    "lockstep_deepspeed, stage 3": job.zero_3,
    "lockstep_ddp": job.ddp,
}
SMALL, LARGE = (328, 8), (1024, 8)  # 10.6 M and 101 M parameters: in the latter what libraries take is little
MIB = 2**20


def one(name: str, size: tuple[int, int], steps: int, what: str) -> float:
    """One fresh pair of ranks."""
    found = run_ranks(
        2, VARIANTS[name], *size, steps, backend=None, timeout=240, env={"OMP_NUM_THREADS": "1"}
    )
    return max(float(of_rank[what]) for of_rank in found)


def parameters(size: tuple[int, int]) -> int:
    return sum(parameter.numel() for parameter in job.Transformer(*size).parameters())


def step_time(rounds: int, steps: int) -> Comparison:
    samples = interleave(
        {name: lambda name=name: one(name, SMALL, steps, "seconds") for name in VARIANTS},  # type: ignore[misc]
        rounds=rounds,
        progress=lambda line: print(line, flush=True),
    )
    title = f"step, {parameters(SMALL) / 1e6:.1f} M parameters, {job.BATCH} x {job.CONTEXT} bytes per rank, 1 thread"
    return Comparison(title, samples, peer=PEER, at_most={OURS: 1.03})


def memory(rounds: int) -> Table:
    count = parameters(LARGE)
    layer = sum(parameter.numel() for parameter in job.Layer(LARGE[0]).parameters())
    # Weights, gradients and two moments of AdamW, 4 bytes each; what is gathered at once: a layer and its gradient.
    formula = {"lockstep_ddp": 16 * count, OURS: 16 * count // 2 + 2 * 4 * layer}
    found = {
        name: statistics.median(one(name, LARGE, 8, "bytes") for _ in range(rounds)) for name in VARIANTS
    }
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
    rounds, steps = (2, 12) if quick else (9, 30)
    tables: list[Comparison | Table] = [step_time(rounds, steps), memory(1 if quick else 3)]
    notes = [
        "Each sample is the median step of a run of its own in two fresh processes; all variants have the same model,"
        " data and optimizer, and those that divide it the same units: a layer each.",
        "Memory is the highest resident size of the process less that before the model is made, after a run of a small"
        " model: so it has the whole model that every rank makes at first, activations and batches, and not what"
        " a process loads once.",
    ]
    return Report("LockstepFSDPStrategy over a fully_shard loop, 2 ranks, gloo", tables, notes)
