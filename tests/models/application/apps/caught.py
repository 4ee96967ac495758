"""A sweep whose last job fails on every rank alike, and the program catches that."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from omegaconf import DictConfig
from torch.utils.data import DataLoader

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep._application.entry import hydra_main


class Model(LightningModule):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.fails = fails

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.fails:
            # All ranks have begun the step: a rank that has not would be stopped before it, with a RankFailedError.
            self.trainer.strategy.barrier()
            raise RuntimeError("planted")
        return self.layer(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@hydra_main("echo_conf", "echo")
def main(config: DictConfig) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=LockstepDDPStrategy(grace_period=5.0),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Model(config.part.value == 2), DataLoader(torch.ones(4, 2)))
    except RuntimeError as error:
        print(f"rank {trainer.global_rank} caught {type(error).__name__}", flush=True)


if __name__ == "__main__":
    main()
