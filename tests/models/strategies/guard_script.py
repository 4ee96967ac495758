"""A user's script whose ranks part ways at batch 3, under a guard.

python guard_script.py CASE FOLDER START_METHOD [option=seconds ...]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_lockstep import LockstepDDPStrategy, LockstepFSDPStrategy, LockstepMPIStrategy

CASE, FOLDER, START, *OPTIONS = sys.argv[1:]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.branch = torch.nn.Linear(4, 4)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            part_ways(self.global_rank)
        loss = self.layer(batch[0]).sum()
        if CASE == "alone" and batch_idx == 3 and self.global_rank == 0:
            self.log("weights", self.branch(self.layer(batch[0])).mean(), rank_zero_only=True)
        if CASE == "unused" and batch_idx == 3 and self.global_rank == 1:
            return loss
        return loss + self.branch(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def part_ways(rank: int) -> None:
    values = torch.ones(4)
    if CASE == "shapes":
        given = torch.ones(1, 5) if rank == 0 else torch.ones(1, 2, 5)
        dist.all_gather([torch.empty_like(given) for _ in range(2)], given)
    if CASE == "operations":
        dist.all_reduce(values) if rank == 0 else dist.broadcast(values, 0)
    if rank == 1:
        keep_waiting()


def keep_waiting() -> None:
    if CASE == "sleep":
        time.sleep(1000)
    if CASE == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if CASE == "pause":
        pause_all()
    if CASE == "busy":
        while not os.path.exists(f"{FOLDER}/go"):
            sum(range(1000))


def pause_all() -> None:
    """Let all ranks be stopped for longer than the stall timeout, as by Ctrl-Z."""
    both = [os.getpid(), os.getppid()]
    command = f"kill -STOP {both[0]} {both[1]}; sleep 5; kill -CONT {both[1]}; sleep 0.3; kill -CONT {both[0]}"
    os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", command)


class StuckRows(Dataset):
    """Rows of which rank 1 never gets the eighth."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 14 and os.environ.get("LOCAL_RANK") == "1":
            time.sleep(1000)
        return torch.ones(4)


def main() -> None:
    given = {name: float(seconds) for name, _, seconds in (option.partition("=") for option in OPTIONS)}
    options: dict[str, Any] = {"stall_timeout": 2.5, "grace_period": 6.0, **given}
    if START == "fsdp":
        options["shard"] = "Linear"
    make = {"mpi": LockstepMPIStrategy, "fsdp": LockstepFSDPStrategy}.get(START, LockstepDDPStrategy)
    strategy = make(**options, **({} if START in ("mpi", "fsdp") else {"start_method": START}))
    rows = StuckRows() if CASE == "loader" else TensorDataset(torch.ones(40, 4))
    loader = DataLoader(rows, batch_size=2, num_workers=1 if CASE == "loader" else 0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
    )
    try:
        trainer.fit(Net(), loader)
    except BaseException as error:
        if CASE == "sleep" and trainer.global_rank == 1:
            time.sleep(0.5)  # what a program does about an error may take a while
        print(f"rank {trainer.global_rank} raises {type(error).__name__}", flush=True)
        raise
    print(f"rank {trainer.global_rank} is done", flush=True)


if __name__ == "__main__":
    main()
