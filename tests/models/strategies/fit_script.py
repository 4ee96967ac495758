"""A user's script: two ranks fit a small network; a fault is provoked at step 5 if asked for.

python fit_script.py FAULT START_METHOD

``endless`` trains until it is stopped; the start method ``mpi`` is the strategy's own mpirun,
``deepspeed_mpi`` is DeepSpeed over mpi4py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_lockstep
from lightning_lockstep import get_logger
from lightning_lockstep.errors import BatchSizeError, LockstepError

FAULT = sys.argv[1] if len(sys.argv) > 1 else "none"
START = sys.argv[2] if len(sys.argv) > 2 else "popen"
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "predict": signal.SIGTERM, "end": signal.SIGKILL}
GRACE = 600.0 if FAULT == "raise@0" else 8.0


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | None:
        if batch_idx == 5 and not FAULT.startswith("end@"):
            provoke(self.global_rank)
        if FAULT == "endless":
            time.sleep(0.02)
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.layer(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.layer(inputs), targets)
        self.log("val_loss", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if FAULT.startswith("end@") and not self.trainer.sanity_checking:
            provoke(self.global_rank)

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            provoke(self.global_rank)
        time.sleep(0.02)
        return self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def provoke(rank: int) -> None:
    kind, _, where = FAULT.partition("@")
    if kind == "flood":
        threading.Thread(target=log_for_ever, args=(rank,), daemon=True).start()
    if kind == "endless":
        print("-" * 60 + f"\nrank {rank} trains", flush=True)
    if where not in (str(rank), "all"):
        return
    if kind == "flood":
        time.sleep(0.2)
    if kind in ("raise", "flood"):
        raise ValueError("boom in training_step")
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    if kind == "ours":
        raise BatchSizeError("nothing fits")
    if kind == "memory":
        torch.empty(1 << 60)


def log_for_ever(rank: int) -> None:
    log = get_logger("flood", "INFO")
    for number in range(10**9):
        log.info("rank %d, line %d", rank, number, in_order=True)
        time.sleep(0.0005)


def after_the_fit(rank: int) -> None:
    """Rank 1 still has something to do when rank 0 is through."""
    if rank == 1:
        time.sleep(2.0)
        print("rank 1 has written its predictions", flush=True)
        if FAULT == "late-fails":
            os._exit(3)


def fit_alone_first(net: Net, data: TensorDataset, options: dict[str, bool]) -> None:
    """Where asked for: be the one rank of a Trainer before others are started."""
    if FAULT == "alone-first":
        strategy = lightning_lockstep.LockstepDDPStrategy()
        trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, **options)
        trainer.fit(net, DataLoader(data, batch_size=16))


def make_strategy() -> Any:
    if START == "deepspeed_mpi":
        return lightning_lockstep.LockstepDeepSpeedStrategy(stage=2, process_group_backend="mpi4py", grace_period=8.0)
    if START == "mpi":
        return lightning_lockstep.LockstepMPIStrategy(grace_period=8.0)
    return lightning_lockstep.LockstepDDPStrategy(start_method=START, grace_period=GRACE)


def before_they_meet() -> None:
    """What happens to rank 1 before it makes its Trainer."""
    if os.environ.get("LOCAL_RANK") != "1":
        return
    if FAULT == "early":
        raise RuntimeError("boom before the ranks met")
    if FAULT == "leaves":
        sys.exit(0)
    if FAULT == "orphan":
        starter = os.getppid()
        os.kill(starter, signal.SIGTERM)
        while os.getppid() == starter:
            time.sleep(0.01)


def main() -> None:
    before_they_meet()
    L.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(320, 8), torch.randint(0, 4, (320,)))
    callbacks: list[Any] = []
    if FAULT == "endless":
        callbacks.append(lightning_lockstep.StopTogether(dirpath="stopped"))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if FAULT == "nodes" else 2,
        num_nodes=2 if FAULT == "nodes" else 1,
        strategy=make_strategy(),
        max_epochs=-1 if FAULT == "endless" else 1,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    net = Net()
    fit_alone_first(net, data, options)
    if FAULT.startswith("predict"):
        trainer.predict(net, DataLoader(data, batch_size=2))
        print("predicted all", flush=True)
    if FAULT.startswith("late"):
        for _ in range(2):  # each fit makes a process group of its own
            trainer.fit(net, DataLoader(data, batch_size=16))
            torch.distributed.destroy_process_group()
            trainer.fit_loop.max_epochs += 1
    trainer.fit(net, DataLoader(data, batch_size=16), DataLoader(data, batch_size=64))
    # In one write, which the line of another rank cannot divide.
    os.write(1, f"rank {trainer.global_rank} fitted {trainer.callback_metrics['val_loss']:.6f}\n".encode())
    if FAULT.startswith("late"):
        after_the_fit(trainer.global_rank)
    elif START == "popen":
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
