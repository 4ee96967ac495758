"""Two ranks train; one of them wants to stop; both leave after the same batch.

python examples/stop_together.py                         # rank 1 sets a breakpoint at batch 7
python examples/stop_together.py --signal                # rank 1 gets a SIGTERM: saved, exit code 75
python examples/stop_together.py --resume checkpoints/preempted.ckpt
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import StopTogether, check_breakpoint, set_breakpoint


class Module(LightningModule):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.mode = mode
        self.first: tuple[int, int] | None = None
        self.last = (-1, -1)

    def training_step(self, batch, batch_idx):
        self.first = self.first or (self.current_epoch, batch_idx)
        self.last = (self.current_epoch, batch_idx)
        if self.global_rank == 1 and batch_idx == 7 and self.mode == "breakpoint":
            set_breakpoint("the loss looks odd")
        if self.global_rank == 1 and batch_idx == 7 and self.mode == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--signal", action="store_true")
    parser.add_argument("--resume")
    given = parser.parse_args()
    mode = "resume" if given.resume else "signal" if given.signal else "breakpoint"
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    module = Module(mode)
    trainer = Trainer(
        accelerator="cpu",
        devices=given.ranks,
        strategy="lockstep_ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StopTogether()],
    )
    loader = DataLoader(TensorDataset(torch.randn(40 * given.ranks, 4)), batch_size=2)
    try:
        trainer.fit(module, loader, ckpt_path=given.resume)
    finally:
        found = check_breakpoint()
        print(
            f"rank {trainer.global_rank}: first batch {module.first}, last batch {module.last},"
            f" breakpoint: {found.reason if found else None}",
            flush=True,
        )


if __name__ == "__main__":
    main()
