"""Four ranks log in order: one has another level, one is silent, one dies.

    python examples/ordered_logging.py

The console shows every line once, in rank order, with the ranks that are missing named. Each rank's own lines are in
ordered_logging/rank-N.log. The last line says which rank was killed; the exit code is not 0.
"""

from __future__ import annotations

import os
import signal
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import RankOrderedLogging, get_logger

log = get_logger("example", "INFO")


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def on_train_start(self) -> None:
        if self.global_rank == 3:
            get_logger("example", "DEBUG")
        log.info("only the main rank says this")
        log.info("all of us are ready", in_order=True)
        log.info("my part is %d", self.global_rank * 10, in_order=True)
        log.debug("only rank 3 logs at this level", in_order=True)
        if self.global_rank != 1:
            log.warning("rank 1 never says this", in_order=True)

    def training_step(self, batch, batch_idx):
        time.sleep(0.2)
        if batch_idx == 8:
            log.info("rank %d at batch 8", self.global_rank, in_order=True)
        if batch_idx == 9 and self.global_rank == 2:
            log.error("rank 2 is about to die", in_order=True)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def main() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy="lockstep_ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RankOrderedLogging(level="DEBUG", order_timeout=1.0, folder="ordered_logging")],
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=2))


if __name__ == "__main__":
    main()
