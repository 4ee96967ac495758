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
from benchmarks.engine import Comparison, Report, Samples, interleave
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
    """Times all steps after the first ones together, until the device has done them."""

    began = seconds = 0.0

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP:
            wait_for_device()
            self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, step: int) -> None:
        if step == self.steps - 1:
            wait_for_device()
            self.seconds = (time.perf_counter() - self.began) / (self.steps - WARMUP)


def step_of(name: str, ranks: int, steps: int) -> float:
    guard, callbacks = VARIANTS[name]
    torch.manual_seed(0)
    clock = Clock(steps)
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
        batches = [(torch.randn(32, 512), torch.randn(32, 512)) for _ in range(8)] * (steps // 8 + 1)
        trainer.fit(Net(WIDTHS["1 M"]), DataLoader(batches[:steps], batch_size=None))  # type: ignore[arg-type]
    return clock.seconds


def in_turn(names: list[str], ranks: int, rounds: int, steps: int) -> Samples:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    variants = {name: lambda name=name: step_of(name, ranks, steps) for name in names}
    return interleave(variants, rounds=rounds, warmup=1, progress=lambda line: print(line, flush=True))


def run(quick: bool) -> Report:
    """One rank, for which there is no guard and nobody to compare with; then two, which share the device."""
    tables = []
    rounds, steps = (3, 60) if quick else (9, 210)
    for ranks, names in (1, [NONE, *DETECTORS, EVERY]), (2, list(VARIANTS)):
        samples = run_ranks(ranks, in_turn, names, ranks, rounds, steps, backend=None, timeout=600)[0]
        over = "nccl" if ranks == 1 and chosen_device() == "cuda" else "gloo"
        title = f"step, 1 M parameters, batch 32 per rank, {ranks} rank{'s' * (ranks > 1)} over {over}"
        tables.append(Comparison(title, samples, peer=NONE))
    notes = ["Each sample is the mean step of a fit of its own, from an idle device to an idle device."]
    return Report("What the guard and callbacks cost on one device", tables, notes)
