"""LockstepDeepSpeedStrategy over DeepSpeed's engine alone, 2 ranks, CPU: step time, and memory by stage of ZeRO."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist

from benchmarks._fit import BARE, WIDTHS, AdamNet, StepTimes, batches, peak, prepare
from benchmarks.engine import Comparison, Report, Table, interleave
from tests.harness import run_ranks

PEER, OURS = "deepspeed.initialize", "lockstep_deepspeed"
# 40 M parameters: states of some hundred MiB, beside which what the libraries take is little.
LARGE = [2048, 6144, 4096, 512]
BATCH = 32
MIB = 2**20


def config(stage: int) -> dict[str, Any]:
    """What both variants give to DeepSpeed; the bucket is small, since DeepSpeed allocates all of it."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 5_000_000,
            "allgather_bucket_size": 5_000_000,
        },
    }


def ours(widths: list[int], stage: int, steps: int) -> dict[str, float]:
    """Fit with the strategy; median step [s] and peak memory above the start [bytes]."""
    from lightning_lockstep import LockstepDeepSpeedStrategy

    prepare()
    times = StepTimes()
    strategy = LockstepDeepSpeedStrategy(config=config(stage), threads_per_rank=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        **BARE,
        callbacks=[times],
    )
    before = psutil.Process().memory_info().rss
    loader = torch.utils.data.DataLoader(batches(widths, steps), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(AdamNet(widths), loader)
    return {"seconds": statistics.median(times.gaps(skip=5)), "bytes": peak() - before}


def bare(widths: list[int], stage: int, steps: int) -> dict[str, float]:
    """The same by ``deepspeed.initialize`` and a loop."""
    prepare()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # to read it is to probe all operations
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    before = psutil.Process().memory_info().rss
    data = batches(widths, steps)
    net = AdamNet(widths)
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=0),
        config=config(stage),
        model=net,
        model_parameters=list(net.parameters()),
        optimizer=net.configure_optimizers(),
        dist_init_required=False,
    )
    net.forward = lambda inputs: net.layers(inputs)  # type: ignore[method-assign]
    starts = []
    for inputs, targets in data:
        starts.append(time.perf_counter())
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
    gaps = [after - begun for begun, after in itertools.pairwise(starts)]
    dist.destroy_process_group()
    return {"seconds": statistics.median(gaps[5:]), "bytes": peak() - before}


VARIANTS: dict[str, Callable[..., dict[str, float]]] = {PEER: bare, OURS: ours}


def one(name: str, widths: list[int], stage: int, steps: int, what: str) -> float:
    """One fresh pair of ranks."""
    found = run_ranks(2, VARIANTS[name], widths, stage, steps, backend=None, timeout=240, env={"OMP_NUM_THREADS": "1"})
    return max(float(of_rank[what]) for of_rank in found)


def step_time(stage: int, rounds: int, steps: int) -> Comparison:
    title = f"step, stage {stage}, 10 M parameters, batch {BATCH} per rank, 1 thread per rank"
    samples = interleave(
        {name: lambda name=name: one(name, WIDTHS["10 M"], stage, steps, "seconds") for name in VARIANTS},  # type: ignore[misc]
        rounds=rounds,
        progress=lambda line: print(f"stage {stage}: {line}", flush=True),
    )
    return Comparison(title, samples, peer=PEER, at_most={OURS: 1.02})


def memory(rounds: int) -> Table:
    parameters = sum(a * b + b for a, b in itertools.pairwise(LARGE))
    rows = []
    for stage in (0, 1, 2, 3):
        found = {
            name: statistics.median(one(name, LARGE, stage, 8, "bytes") for _ in range(rounds)) for name in VARIANTS
        }
        rows.append([f"{stage}", *(f"{found[name] / MIB:.0f}" for name in VARIANTS)])
        print(f"memory, stage {stage}: {rows[-1]}", flush=True)
    return Table(
        f"peak memory of a rank above its start [MiB], {parameters / 1e6:.1f} M parameters in float32, AdamW",
        ["stage", *VARIANTS],
        rows,
    )


def run(quick: bool) -> Report:
    """Step time of stages 1 and 2, memory of all stages."""
    rounds, steps = (2, 15) if quick else (7, 30)
    tables: list[Comparison | Table] = [step_time(stage, rounds, steps) for stage in (1, 2)]
    tables.append(memory(1 if quick else 3))
    notes = [
        "Each sample is the median step of a run of its own in two fresh processes; both variants have the same"
        " configuration, model, data and optimizer.",
        "Memory is the highest resident size of the process less that before the model is made, so it has the"
        " activations, the batches, the whole model that every rank makes at first, and what the libraries allocate"
        " meanwhile.",
    ]
    return Report("LockstepDeepSpeedStrategy over deepspeed.initialize, 2 ranks, gloo", tables, notes)
