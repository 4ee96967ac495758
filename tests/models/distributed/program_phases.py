"""Two fits on two ranks, with a fault in one phase: python program_phases.py FOLDER PHASE FAULT TARGET.

FOLDER takes what each rank raised (``RANK.raised``), when the fault came (``RANK.fault``) and when each rank knew
(``RANK.knew``). TARGET is a rank or ``all``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch.utils.data import DataLoader

from lightning_lockstep import LockstepDDPStrategy

FOLDER, PHASE, FAULT, TARGET = Path(sys.argv[1]), *sys.argv[2:5]
RANK = os.environ.get("LOCAL_RANK", "0")
# A stopped rank is found by its silence alone: on a busy machine the stall may be noticed first, and is as true.
GRACE, SILENCE, STALL = 6.0, 3.0, 60.0 if FAULT == "stop" else 2.0
fits = 0


def note(name: str, text: str = "") -> None:
    (FOLDER / f"{RANK}.{name}").write_text(text or repr(time.time()))


def fail() -> None:
    raise ValueError(f"boom in {PHASE}")


def call_another() -> None:
    dist.all_reduce(torch.ones(3))


FAULTS = {
    "raise": fail,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "never": lambda: time.sleep(600),
    "other": call_another,
    "exit0": lambda: sys.exit(0),
    "_exit0": lambda: os._exit(0),
    "ctrl_c": lambda: os.killpg(0, signal.SIGINT),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


def at(phase: str) -> None:
    """Let the fault happen if its phase has come, once: in the first fit, or in a step of the second one."""
    in_fit = phase not in ("before", "between", "after")
    wanted = "forward" if PHASE == "second" else PHASE
    is_here = phase == wanted and (not in_fit or fits == (2 if PHASE == "second" else 1))
    if is_here and TARGET in (RANK, "all") and not (FOLDER / f"{RANK}.fault").exists():
        note("fault")
        FAULTS[FAULT]()


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def setup(self, stage: str) -> None:
        at("setup")

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        at("forward")
        loss = self.layer(batch).sum()
        loss.register_hook(lambda gradient: at("backward"))
        return loss

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        at("optimizer")
        super().optimizer_step(*args, **options)

    def validation_step(self, batch: Any, index: int) -> None:
        at("sanity" if self.trainer.sanity_checking else "validation")
        self.log("loss", self.layer(batch).mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            at("validation_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        at("save")

    def on_train_epoch_end(self) -> None:
        at("epoch_end")

    def on_train_end(self) -> None:
        at("train_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Knows(Callback):
    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        note("knew")


def fit() -> None:
    global fits
    fits += 1
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=LockstepDDPStrategy(grace_period=GRACE, silence_limit=SILENCE, stall_timeout=STALL),
        max_epochs=1,
        limit_train_batches=3,
        limit_val_batches=2,
        callbacks=[Knows(), ModelCheckpoint(FOLDER / "checkpoints", save_top_k=-1)],
        logger=False,
        default_root_dir=FOLDER,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(RandomDataset(32, 16), 2)
    trainer.fit(Net(), data, data)


try:
    at("before")
    fit()
    at("between")
    fit()
    if PHASE == "after":  # which begins when both ranks have left the last fit
        note("left")
        while not all((FOLDER / f"{rank}.left").exists() for rank in "01"):
            time.sleep(0.02)
    at("after")
except BaseException as error:
    note("raised", type(error).__name__)
    raise
note("done")
