"""What one process does in the topic ``xla``: steps of ours and of a bare loop in turn, or a count of compilations."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks._deepspeed_job import AdamNet
from benchmarks._fit import BARE, WIDTHS
from benchmarks.engine import interleave
from lightning_lockstep import LockstepXLASPMDStrategy

BARE_LOOP, OURS, STATIC, STOCK = "bare loop", "lockstep_xla_spmd", "with StaticShapes", "Lightning's"
DEVICES, BATCH, WARMUP = 4, 64, 10
NOTHING, STEP, STEP_AND_EPOCH = "nothing", "step", "step_and_epoch"  # what is logged
EPOCHS, DIGITS = 3, 300  # batches of 64, the last one of 44


def finish() -> None:
    """Wait until the devices are through."""
    importlib.import_module("torch_xla").sync()
    importlib.import_module("torch_xla.core.xla_model").wait_device_ops()


def compilations() -> int:
    """Graphs compiled so far in this process."""
    metrics = importlib.import_module("torch_xla.debug.metrics")
    return int(metrics.counter_value("UncachedCompile") or 0)


class Clock(pl.Callback):
    """Time per step after the warm-up, with the devices through at both ends."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began, self.seconds = steps, 0.0, 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP:
            finish()
            self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.steps:
            finish()
            self.seconds = (time.perf_counter() - self.began) / (self.steps - WARMUP)


class Digits(pl.LightningModule):
    """A classifier of digits, which logs its loss as ``logs`` says: for the step, for step and epoch, or not at all."""

    def __init__(self, *, logs: str) -> None:
        super().__init__()
        self.logs = logs
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.compiled: list[int] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.logs != NOTHING:
            self.log("loss", loss, on_step=True, on_epoch=self.logs == STEP_AND_EPOCH)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.compiled.append(compilations())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit_ours(module: pl.LightningModule, data: Any, *callbacks: pl.Callback, epochs: int = 1) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy=LockstepXLASPMDStrategy(),
        max_epochs=epochs,
        callbacks=list(callbacks),
        **BARE,
    )
    trainer.fit(module, data)


def loop(module: Any, data: Any, forward: Callable[..., Tensor], after_step: Callable[[int], None]) -> None:
    """What one writes by hand with torch-xla: the same mesh, the same division of each batch, the same optimizer."""
    torch_xla, spmd = (importlib.import_module(f"torch_xla{part}") for part in ("", ".distributed.spmd"))
    runtime = importlib.import_module("torch_xla.runtime")
    runtime.use_spmd()
    mesh = spmd.Mesh(np.arange(DEVICES), (DEVICES,), ("data",))
    device = torch_xla.device()
    module.to(device)
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(data):
        inputs, targets = (part.to(device) for part in batch)
        for part in (inputs, targets):
            spmd.mark_sharding(part, mesh, ("data", *[None] * (part.dim() - 1)))
        loss = forward(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        after_step(index)


def step_ours(model: str, steps: int) -> float:
    clock = Clock(steps)
    fit_ours(AdamNet(WIDTHS[model]), loader(model, steps), clock)
    return clock.seconds


def step_bare(model: str, steps: int) -> float:
    began = seconds = 0.0

    def after_step(index: int) -> None:
        nonlocal began, seconds
        if index + 1 == WARMUP:
            finish()
            began = time.perf_counter()
        if index + 1 == steps:
            finish()
            seconds = (time.perf_counter() - began) / (steps - WARMUP)

    net = AdamNet(WIDTHS[model])
    loop(net, loader(model, steps), lambda x, y: nn.functional.mse_loss(net.layers(x), y), after_step)
    return seconds


def loader(model: str, steps: int) -> Any:
    widths = WIDTHS[model]
    data = [(torch.randn(BATCH, widths[0]), torch.randn(BATCH, widths[-1])) for _ in range(8)]
    return torch.utils.data.DataLoader([data[i % 8] for i in range(steps)], batch_size=None)  # type: ignore[arg-type]


def steps(model: str, count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, by variant; both have compiled before the first round that counts."""
    variants = {BARE_LOOP: lambda: step_bare(model, count), OURS: lambda: step_ours(model, count)}
    return interleave(variants, rounds=rounds, warmup=1, progress=lambda line: print(line, flush=True))


def compiled_after_two_steps(variant: str, *, logs: str) -> int:
    """How much was compiled after the second step of three epochs of digits."""
    data, module = digits(), Digits(logs=logs)
    if variant == BARE_LOOP:
        batches = (batch for _ in range(EPOCHS) for batch in data)
        forward = lambda x, y: nn.functional.cross_entropy(module.net(x), y)  # noqa: E731
        loop(module, batches, forward, lambda _: module.on_train_batch_end())
    elif variant == STOCK:
        fit_stock(module, data)
    else:
        callbacks = (
            [importlib.import_module("lightning_lockstep").StaticShapes()] if variant == STATIC else []
        )
        fit_ours(module, data, *callbacks, epochs=EPOCHS)
    finish()
    return compilations() - module.compiled[1]


def fit_stock(module: pl.LightningModule, data: Any) -> None:
    """Lightning's own strategy on one device, with our accelerator: its own take virtual devices for none."""
    accelerator = importlib.import_module("lightning_lockstep.xla.steps").XLADevices()
    strategy = importlib.import_module("lightning.pytorch.strategies").SingleDeviceXLAStrategy(0)
    pl.Trainer(accelerator=accelerator, devices=1, strategy=strategy, max_epochs=EPOCHS, **BARE).fit(
        module, data
    )


def digits() -> Any:
    found = importlib.import_module("sklearn.datasets").load_digits()
    rows, labels = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    data = torch.utils.data.TensorDataset(rows[:DIGITS], labels[:DIGITS])
    return torch.utils.data.DataLoader(data, BATCH)


def main(what: str, *arguments: str) -> None:
    """Write to the file named last what ``steps`` or ``compilations`` has found, as JSON."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    found: Any
    if what == "steps":
        found = steps(arguments[0], int(arguments[1]), int(arguments[2]))
    else:
        found = compiled_after_two_steps(arguments[0], logs=arguments[1])
    Path(arguments[-1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
