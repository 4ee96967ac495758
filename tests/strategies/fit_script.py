"""A user's script: two ranks fit a small network; a fault is provoked at step 5 if asked for.

python fit_script.py FAULT START_METHOD
"""

from __future__ import annotations

import os
import signal
import sys
import time

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_lockstep
from lightning_lockstep.errors import BatchSizeError, LockstepError

FAULT = sys.argv[1] if len(sys.argv) > 1 else "none"
START = sys.argv[2] if len(sys.argv) > 2 else "popen"


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | None:
        if batch_idx == 5:
            provoke(self.global_rank)
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.layer(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.layer(inputs), targets)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Pruned(Exception):
    """What a sweep's pruning callback raises on every rank."""


def provoke(rank: int) -> None:
    kind, _, where = FAULT.partition("@")
    if kind == "prune":
        raise Pruned(f"on rank {rank}")
    if kind == "wait":
        print("waiting", flush=True)
        time.sleep(300)
    if where != str(rank):
        return
    if kind == "raise":
        raise ValueError("boom in training_step")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "ours":
        raise BatchSizeError("nothing fits")
    if kind == "memory":
        torch.empty(1 << 60)


def forget_fault() -> None:
    global FAULT
    FAULT = "none"


def main() -> None:
    if FAULT == "early" and os.environ.get("LOCAL_RANK") == "1":
        raise RuntimeError("boom before the ranks met")
    L.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(320, 8), torch.randint(0, 4, (320,)))
    strategy = lightning_lockstep.LockstepDDPStrategy(start_method=START, grace_period=8.0)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if FAULT == "nodes" else 2,
        num_nodes=2 if FAULT == "nodes" else 1,
        strategy=strategy,
        max_epochs=1,
        enable_model_summary=False,
        **options,
    )
    net = Net()
    if FAULT == "prune":
        try:
            trainer.fit(net, DataLoader(data, batch_size=16))
        except Pruned as error:
            print(f"caught {error}", flush=True)
        forget_fault()
        strategy = lightning_lockstep.LockstepDDPStrategy(grace_period=3.0)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=1,
            enable_model_summary=False,
            **options,
        )
    trainer.fit(net, DataLoader(data, batch_size=16), DataLoader(data, batch_size=64))
    print(f"rank {trainer.global_rank} fitted {trainer.callback_metrics['val_loss']:.6f}", flush=True)
    if START == "popen":
        again = L.Trainer(accelerator="cpu", devices=trainer.num_devices, num_nodes=trainer.num_nodes,
                          strategy="lockstep_ddp", **options)  # fmt: skip
        again.validate(net, DataLoader(data, batch_size=64), verbose=False)
        print(f"rank {again.global_rank} validated {again.callback_metrics['val_loss']:.6f}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except LockstepError as error:
        print(f"caught {type(error).__name__}", flush=True)
        raise
