"""LockstepXLASPMDStrategy over a bare torch-xla loop on virtual devices: step time, and compilations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import _xla_job as job
from benchmarks.engine import Comparison, Report, Table
from lightning_lockstep.xla.runtime import check_torch_xla

ROOT = Path(__file__).resolve().parents[1]


def in_process(*arguments: str) -> Any:
    """What the job has found in a fresh process with virtual devices; the last line of its error where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        virtual = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(job.DEVICES), "PYTHONPATH": path}
        command = [sys.executable, "-m", "benchmarks._xla_job", *arguments, str(result)]
        done = subprocess.run(
            command, env=os.environ | virtual, stderr=subprocess.PIPE, text=True, timeout=900
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line and not line[0].isspace()]
            raise JobError(next((line for line in reversed(lines) if "Error" in line), lines[-1]))
        return json.loads(result.read_text())


class JobError(RuntimeError):
    """What a job has raised, in a line."""


def step_time(model: str, steps: int, rounds: int) -> Comparison:
    title = f"step, {model} parameters, AdamW, batch {job.BATCH} over {job.DEVICES} devices"
    samples = in_process("steps", model, str(steps), str(rounds))
    return Comparison(title, samples, peer=job.BARE_LOOP, at_most={job.OURS: 1.05})


def late_compilations() -> Table:
    logs = (job.NOTHING, job.STEP, job.STEP_AND_EPOCH)
    rows = [
        [variant, *(late_compilations_of(variant, logged) for logged in logs), goal]
        for variant, goal in ((job.BARE_LOOP, ""), (job.OURS, ""), (job.STATIC, "0"), (job.STOCK, ""))
    ]
    title = (
        f"compilations after the second step, digits, {job.EPOCHS} epochs of 4 batches of 64 and one of 44"
    )
    columns = ["variant", "nothing logged", "loss of the step", "of step and epoch", "goal, nothing logged"]
    return Table(title, columns, rows)


def late_compilations_of(variant: str, logged: str) -> str:
    """A count, or why there is none."""
    if variant == job.BARE_LOOP and logged != job.NOTHING:
        return ""
    print(f"compilations: {variant}, {logged}", flush=True)
    try:
        return str(in_process("compilations", variant, logged))
    except JobError as error:
        return f"did not run: {error}"


def run(quick: bool) -> Report:
    """Step time, and compilations of all variants."""
    check_torch_xla("python -m benchmarks xla")
    rounds, steps = (2, 20) if quick else (5, 30)
    tables: list[Comparison | Table] = [step_time("1 M", steps, rounds), late_compilations()]
    notes = [
        "Both variants of a step take turns in one process; a sample is the mean of the steps after the first"
        f" {job.WARMUP} of a fit, and the devices are through at its beginning and its end. The warm-up round has"
        " compiled for both.",
        "The bare loop has the same mesh, divides each batch alike and calls torch_xla.sync() after each step; neither"
        " logs nor reads anything.",
        "Compilations are counted by torch-xla (UncachedCompile), each variant in a process of its own. With the loss"
        " logged for the epoch too, two of them are of the mean over the epoch: graphs of a few operations. What"
        " Lightning's strategy compiles more with the loss of the step is the whole step, in the second epoch."
        " StaticShapes is at its defaults (last_batch='drop').",
        "Lightning's own strategy (SingleDeviceXLAStrategy) has one device and our accelerator, since its own take"
        " virtual devices for none.",
    ]
    if os.getloadavg()[1] > 2 * (os.cpu_count() or 1):
        notes.append(
            "Other programs shared the cores meanwhile: steps take longer than alone, and ratios spread."
        )
    return Report("LockstepXLASPMDStrategy over a bare torch-xla SPMD loop, virtual devices", tables, notes)
