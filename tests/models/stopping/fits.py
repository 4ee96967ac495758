"""Small fits that the tests of this room share; run in a rank."""

from __future__ import annotations

import logging
import math
import os
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import SyncedEarlyStopping
from lightning_lockstep._lightning import EarlyStopping, LightningModule, Trainer
from tests.harness import QUIET

BATCHES = 12

#: metric of (rank, epoch) by case; None: the rank does not log it
CASES: dict[str, Any] = {
    "only rank 0 has it": lambda rank, epoch: 1.0 if rank == 0 else None,
    "different values": lambda rank, epoch: (1.0 - 0.1 * epoch) if rank == 0 else (1.0 + 0.3 * epoch),
    "nan on rank 1": lambda rank, epoch: math.nan if rank == 1 and epoch == 1 else 1.0 - 0.1 * epoch,
}


class Module(LightningModule):
    """Notes what it sees; does on a batch what it is told to."""

    def __init__(self, metric: Any = None, act: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.metric, self.act = metric, act
        self.seen: list[tuple[int, int, list[int]]] = []
        self.act_in_validation: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, ids = batch
        self.seen.append((self.current_epoch, batch_idx, ids.tolist()))
        if self.act is not None:
            self.act(self, batch_idx)
        return self.layer(x).square().mean()

    def on_train_epoch_end(self) -> None:
        value = self.metric(self.global_rank, self.current_epoch) if self.metric is not None else None
        if value is not None:
            self.log("m", value)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.act_in_validation is not None:
            self.act_in_validation(self, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def world_size() -> int:
    """Number of ranks; Lightning takes WORLD_SIZE out of the environment at the end of a fit."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def world_rank() -> int:
    """This rank, before and after the process group is made."""
    return int(os.environ.get("RANK", "0"))


def fit(module: Module, callbacks: list[Any], folder: str, **options: Any) -> Trainer:
    """Fit on this process group; every rank runs this."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    world = world_size()
    rows = 2 * BATCHES * world
    ckpt_path = options.pop("ckpt_path", None)
    validates = options.pop("validates", False)
    strategy = options.pop("strategy", "ddp" if world > 1 else "auto")
    torch.manual_seed(3)
    settings = {**QUIET, "max_epochs": 6, **options}
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        default_root_dir=folder,
        callbacks=callbacks,
        **settings,
    )
    data = TensorDataset(torch.ones(rows, 4), torch.arange(rows))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    validation = DataLoader(data, batch_size=world * BATCHES) if validates else None
    trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    return trainer


def outcome(trainer: Trainer, callback: EarlyStopping) -> dict[str, Any]:
    """What a rank ends with."""
    return {
        "epochs": trainer.current_epoch,
        "stopped_epoch": callback.stopped_epoch,
        "reason": callback.stopping_reason.name,
        "message": callback.stopping_reason_message,
        "wait_count": callback.wait_count,
        "best_score": round(float(callback.best_score), 4),
    }


def early_stopping_case(case: str, folder: str, stock: bool, **settings: Any) -> dict[str, Any]:
    """Fit with one of CASES under Lightning's callback or ours."""
    settings = {"monitor": "m", "patience": 2, "check_on_train_epoch_end": True, **settings}
    callback = EarlyStopping(**settings) if stock else SyncedEarlyStopping(**settings)
    try:
        return outcome(fit(Module(CASES[case]), [callback], folder), callback)
    except RuntimeError as error:
        return {"error": type(error).__name__, "message": str(error), "wait_count": callback.wait_count}
