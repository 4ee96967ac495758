"""Small fits in which one rank is slow; run in a rank."""

from __future__ import annotations

import io
import logging
import sys
import time
import warnings
from contextlib import redirect_stderr
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_lockstep import LockstepDDPStrategy, StragglerMonitor
from lightning_lockstep._lightning import Callback, LightningModule, Logger, Trainer
from lightning_lockstep.distributed import current_communicator
from tests.harness import QUIET

#: How long the slow rank keeps the others waiting, much more than a step takes [s].
SLOW = 0.06
#: In the place of a slow rank: all are slow alike.
ALL = -1


class Data(Dataset):  # type: ignore[type-arg]
    """Samples that take long to load on one rank."""

    def __init__(self, slow: Any) -> None:
        self.slow, self.loaded = slow, 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        self.slow("data", self.loaded)
        return torch.ones(8)


class Module(LightningModule):
    """Sleeps where it is told to."""

    def __init__(self, slow: Any, synchronizes: bool) -> None:
        super().__init__()
        self.slow, self.synchronizes = slow, synchronizes
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.slow("forward", batch_idx)
        loss = self.layers(batch).square().mean()
        if self.synchronizes:
            self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Slow(Callback):
    """A callback that takes long on one rank."""

    def __init__(self, slow: Any) -> None:
        self.slow = slow

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.slow("callback", batch_idx)


class Kept(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: list[dict[str, float]] = []

    name, version = "kept", "0"

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.figures.append(dict(metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def fit(
    slow_rank: int,
    where: str = "forward",
    every: int = 1,
    *,
    steps: int = 24,
    seconds: float = SLOW,
    strategy: Any = None,
    synchronizes: bool = False,
    devices: Any = None,
    accumulate: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Fit with a slow rank on the ranks of this process group; returns what the monitor of this rank has said."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def slow(place: str, count: int) -> None:
        if where == place and slow_rank in (ALL, current_communicator().rank) and count % every == 0:
            time.sleep(seconds)
        elif where == "raise" and current_communicator().rank == slow_rank and place == "forward" and count == every:
            raise ValueError("a bad batch on purpose")

    printed, kept = io.StringIO(), Kept()
    monitor = StragglerMonitor(**{"every_n_steps": 8, **options})
    handler = logging.StreamHandler(printed)
    logger = logging.getLogger("lightning_lockstep.callbacks.straggler_monitor")
    logger.addHandler(handler)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices or current_world_size(),
        strategy=strategy or LockstepDDPStrategy(threads_per_rank=1),
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        **{**QUIET, "logger": kept, "log_every_n_steps": 10_000},
        callbacks=[monitor, Slow(slow)],
    )
    try:
        with redirect_stderr(printed):
            trainer.fit(Module(slow, synchronizes), DataLoader(Data(slow), batch_size=1))
    finally:
        logger.removeHandler(handler)
    lines = [line for line in printed.getvalue().splitlines() if "StragglerMonitor" in line]
    figures = [one for one in kept.figures if "straggler/rank" in one]
    found = {
        "verdict": asdict(monitor.verdict),
        "lines": lines,
        "text": printed.getvalue(),
        "figures": figures,
    }
    sys.stderr.write(printed.getvalue())
    return found


def current_world_size() -> int:
    """Number of ranks of the process group that there is."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
