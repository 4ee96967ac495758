"""A step with LockstepXLASPMDStrategy over a bare torch-xla loop, on virtual devices."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from benchmarks._fit import BARE, WIDTHS, AdamNet, batches, prepare
from benchmarks.engine import Comparison, Report, interleave
from lightning_lockstep import LockstepXLASPMDStrategy
from lightning_lockstep.xla.runtime import check_torch_xla

ROOT = Path(__file__).resolve().parents[1]
BARE_LOOP, OURS = "bare loop", "lockstep_xla_spmd"
DEVICES, BATCH, WARMUP = 4, 64, 10


class Clock(pl.Callback):
    """Time per step after the warm-up, with the devices through at both ends."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began, self.seconds = steps, 0.0, 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after_step(batch_idx)

    def after_step(self, index: int) -> None:
        if index + 1 in (WARMUP, self.steps):
            importlib.import_module("torch_xla").sync()
            importlib.import_module("torch_xla.core.xla_model").wait_device_ops()
            self.seconds = (time.perf_counter() - self.began) / (self.steps - WARMUP)
            self.began = time.perf_counter()


def ours(clock: Clock, widths: list[int]) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy=LockstepXLASPMDStrategy(),
        max_epochs=1,
        callbacks=[clock],
        **BARE,
    )
    loader = torch.utils.data.DataLoader(batches(widths, clock.steps, BATCH), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(AdamNet(widths), loader)


def bare(clock: Clock, widths: list[int]) -> None:
    """What one writes by hand with torch-xla: the same mesh, the same division of each batch, the same optimizer."""
    torch_xla, spmd = (importlib.import_module(f"torch_xla{part}") for part in ("", ".distributed.spmd"))
    importlib.import_module("torch_xla.runtime").use_spmd()
    mesh = spmd.Mesh(np.arange(DEVICES), (DEVICES,), ("data",))
    device = torch_xla.device()
    module = AdamNet(widths).to(device)
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(batches(widths, clock.steps, BATCH)):
        inputs, targets = (part.to(device) for part in batch)
        for part in (inputs, targets):
            spmd.mark_sharding(part, mesh, ("data", *[None] * (part.dim() - 1)))
        loss = nn.functional.mse_loss(module.layers(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        clock.after_step(index)


def in_process(steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, by variant; both have compiled before the first round that counts."""

    def one(train: Any) -> float:
        clock = Clock(steps)
        train(clock, WIDTHS["1 M"])
        return clock.seconds

    variants = {BARE_LOOP: lambda: one(bare), OURS: lambda: one(ours)}
    return interleave(variants, rounds=rounds, warmup=1, progress=lambda line: print(line, flush=True))


def run(quick: bool) -> Report:
    """Both in turn in a process that has virtual devices."""
    check_torch_xla("python -m benchmarks xla")
    rounds, steps = (2, 20) if quick else (5, 30)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        virtual = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES), "PYTHONPATH": path}
        command = [sys.executable, "-m", "benchmarks.bench_xla", str(steps), str(rounds), str(result)]
        subprocess.run(command, env=os.environ | virtual, check=True, timeout=900)
        samples = json.loads(result.read_text())
    title = f"step, 1 M parameters, AdamW, batch {BATCH} over {DEVICES} devices"
    table = Comparison(title, samples, peer=BARE_LOOP, at_most={OURS: 1.05})
    notes = [
        "Both variants take turns in one process; a sample is the mean of the steps after the first"
        f" {WARMUP} of a fit, and the devices are through at its beginning and its end. The warm-up round has"
        " compiled for both.",
        "The bare loop has the same mesh, divides each batch alike and calls torch_xla.sync() after each step; neither"
        " logs nor reads anything.",
    ]
    return Report("LockstepXLASPMDStrategy over a bare torch-xla SPMD loop, virtual devices", [table], notes)


if __name__ == "__main__":
    prepare()
    Path(sys.argv[3]).write_text(json.dumps(in_process(int(sys.argv[1]), int(sys.argv[2]))))
