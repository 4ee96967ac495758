"""Small fits that the tests of this room share; run in a rank."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import Preempted, StopTogether, SyncedEarlyStopping, check_breakpoint, set_breakpoint
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
    workers = options.pop("num_workers", 0)
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
    loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
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


def break_on(rank: int, batch: int) -> Any:
    def act(module: Module, batch_idx: int) -> None:
        if module.global_rank == rank and module.current_epoch == 0 and batch_idx == batch:
            set_breakpoint("the loss looks odd")
        take_time(module, batch_idx, after=(0, batch))

    return act


def terminate_on(rank: int, epoch: int, batch: int, number: signal.Signals = signal.SIGTERM) -> Any:
    def act(module: Module, batch_idx: int) -> None:
        if (module.global_rank, module.current_epoch, batch_idx) == (rank, epoch, batch):
            os.kill(os.getpid(), number)
        take_time(module, batch_idx, after=(epoch, batch))

    return act


def take_time(module: Module, batch_idx: int, after: tuple[int, int]) -> None:
    """Take longer over the batches after a request, so that few of them pass while it travels on a busy machine."""
    time.sleep(0.1 if (module.current_epoch, batch_idx) > after else 0.003)


def breakpoints(folder: str) -> dict[str, Any]:
    module = Module(act=break_on(1, 7))
    trainer = fit(module, [StopTogether()], folder, min_epochs=3)
    found = check_breakpoint()
    again = Module()
    fit(again, [StopTogether()], folder, max_epochs=1)
    return {
        "last": module.seen[-1][:2],
        "reason": found.reason if found else None,
        "min_epochs": trainer.fit_loop.min_epochs,
        "again": len(again.seen),
        "after": check_breakpoint(),
    }


def preempted_then_resumed(folder: str, number: int, options: dict[str, Any]) -> dict[str, Any]:
    world = world_size()
    whole = Module()
    fit(whole, [StopTogether()], folder, max_epochs=3, **options)
    first = Module(act=terminate_on(world - 1, 1, 4, signal.Signals(number)))
    before = signal.getsignal(number)
    try:
        fit(first, [StopTogether()], folder, max_epochs=3, **options)
        return {"left": False}
    except Preempted as preempted:
        left = {"code": preempted.code, "reason": preempted.reason, "checkpoint": preempted.checkpoint}
    second = Module()
    trainer = fit(second, [StopTogether()], folder, max_epochs=3, ckpt_path=left["checkpoint"], **options)
    return {
        **left,
        "handler given back": signal.getsignal(number) == before,
        "same batches": first.seen + second.seen == whole.seen,
        "cut": len(first.seen),
        "steps": trainer.global_step,
    }


def check_breakpoints(values: list[dict[str, Any]]) -> None:
    assert all(value == values[0] for value in values)
    assert (0, 7) <= tuple(values[0]["last"]) < (2, BATCHES - 1), "not before the request, and before the end"
    assert values[0]["reason"] == "rank 1: the loss looks odd"
    assert values[0]["min_epochs"] == 3, "given back after the fit"
    assert values[0]["again"] == BATCHES and values[0]["after"] is None


def check_preempted(values: list[dict[str, Any]], number: signal.Signals, cut_at: int = 1) -> None:
    assert all(v["code"] == 75 and v["same batches"] and v["handler given back"] for v in values)
    assert len({v["cut"] for v in values}) == 1 and len({v["checkpoint"] for v in values}) == 1
    assert BATCHES + 5 <= values[0]["cut"] < 3 * BATCHES, "not before the signal, and before the end"
    assert values[0]["cut"] % cut_at == 0, "accumulated gradients are not thrown away"
    assert values[0]["reason"] == f"rank {len(values) - 1}: received {number.name}"
    assert Path(values[0]["checkpoint"]).name == "preempted.ckpt"
    assert len({v["steps"] for v in values}) == 1
