"""A step on one device with the guard, ReplicaCheck, OverflowDetector and all callbacks, over none of them."""

from __future__ import annotations

import logging
import os
import tempfile
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

import lightning_lockstep as lockstep
from benchmarks._fit import BARE, WIDTHS, Net
from benchmarks.engine import Comparison, Report, Samples, Table, interleave
from lightning_lockstep import LockstepDDPStrategy
from tests.harness import chosen_device, on_device, run_ranks, wait_for_device

NONE, EVERY, REPLICAS = "none", "every callback", "ReplicaCheck every 10 steps"
#: The guard, and the callbacks with their options.
VARIANTS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    NONE: ("off", {}),
    "guard watch": ("watch", {}),
    "guard verify": ("verify", {}),
    REPLICAS: ("off", {"ReplicaCheck": {"every_n_steps": 10}}),
    "OverflowDetector": ("off", {"OverflowDetector": {}}),
    "OverflowDetector hooks": ("off", {"OverflowDetector": {"mode": "hooks"}}),
    EVERY: (
        "watch",
        {
            "AutoBatchSize": {"mode": "off", "on_oom": "split"},
            "OverflowDetector": {},
            "ReplicaCheck": {"every_n_steps": 10},
            "StaticShapes": {},
            "StopTogether": {},
            "StragglerMonitor": {},
        },
    ),
}
DETECTORS = ("OverflowDetector", "OverflowDetector hooks")
WARMUP = 10


class Clock(Callback):
    """Times all steps after the first ones together, until the device has done them; or counts the host's waits."""

    began = seconds = 0.0

    def __init__(self, steps: int, profiler: torch.profiler.profile | None = None) -> None:
        self.steps, self.profiler = steps, profiler

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP:
            wait_for_device()
            if self.profiler is not None:
                self.profiler.start()
            self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, step: int) -> None:
        if step == self.steps - 1:
            if self.profiler is not None:
                self.profiler.stop()
            wait_for_device()
            self.seconds = (time.perf_counter() - self.began) / (self.steps - WARMUP)


def step_of(name: str, model: str, ranks: int, steps: int, profiler: torch.profiler.profile | None = None) -> float:
    """Fit with a variant; the mean step [s]."""
    guard, callbacks = VARIANTS[name]
    torch.manual_seed(0)
    clock, widths = Clock(steps, profiler), WIDTHS[model]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            **on_device(ranks),
            strategy=LockstepDDPStrategy(guard=guard, threads_per_rank=1),  # type: ignore[arg-type]
            max_epochs=1,
            use_distributed_sampler=False,
            default_root_dir=folder,
            **BARE,
            callbacks=[*(getattr(lockstep, one)(**given) for one, given in callbacks.items()), clock],
        )
        torch.manual_seed(int(os.environ["RANK"]))
        batches = [(torch.randn(32, widths[0]), torch.randn(32, widths[-1])) for _ in range(8)]
        given = [batches[step % 8] for step in range(steps)]
        trainer.fit(Net(widths), DataLoader(given, batch_size=None))  # type: ignore[arg-type]
    return clock.seconds


def waits(names: list[str], model: str, ranks: int, steps: int = 50) -> list[list[str]]:
    """How often and how long the host waits for the device in a step of each variant, by torch's profiler."""
    rows = []
    for name in names:
        profiler = torch.profiler.profile()
        step_of(name, model, ranks, steps, profiler)
        found = [one for one in profiler.key_averages() if one.key.startswith("cuda") and "Synchron" in one.key]
        count = sum(one.count for one in found) / (steps - WARMUP)
        milliseconds = sum(one.cpu_time_total for one in found) / 1000 / (steps - WARMUP)
        rows.append([name, f"{count:.2f}", f"{milliseconds:.3f}"])
    return rows


def in_turn(names: list[str], model: str, ranks: int, rounds: int, steps: int) -> Samples:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    variants = {name: lambda name=name: step_of(name, model, ranks, steps) for name in names}
    return interleave(variants, rounds=rounds, warmup=1, progress=lambda line: print(line, flush=True))


def run(quick: bool) -> Report:
    """One rank, for which there is no guard and nobody to compare with; then two, which share the device."""
    tables: list[Comparison | Table] = []
    rounds, steps = (3, 60) if quick else (9, 210)
    on_card, alone = chosen_device() == "cuda", [NONE, *DETECTORS, EVERY]
    cases = [("1 M", 1, alone), ("1 M", 2, list(VARIANTS))]
    for model, ranks, names in [("100 M", 1, alone), *cases] if on_card else cases:
        samples = run_ranks(ranks, in_turn, names, model, ranks, rounds, steps, backend=None, timeout=600)[0]
        over = "nccl" if ranks == 1 and on_card else "gloo"
        title = f"step, {model} parameters, batch 32 per rank, {ranks} rank{'s' * (ranks > 1)} over {over}"
        goal = {EVERY: 1.05} if model == "100 M" else {}
        tables.append(Comparison(title, samples, peer=NONE, at_most=goal))
    if on_card:
        columns = ["variant", "waits of a step", "milliseconds of a step"]
        rows = run_ranks(1, waits, alone, "100 M", 1, backend=None, timeout=120)[0]
        tables.append(Table("how often the host waits for the device, 100 M parameters", columns, rows))
    notes = ["Each sample is the mean step of a fit of its own, from an idle device to an idle device."]
    return Report("What the guard and callbacks cost on one device", tables, notes)
