"""Each rank writes down the configuration it was given. With ECHO_FIT=1 the strategy starts the ranks."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from lightning_lockstep._application.entry import hydra_main
from lightning_lockstep.launchers.hydra import RANK_CONFIG

PLAIN = os.environ.get("ECHO_MAIN") == "hydra"
decorate = hydra.main("echo_conf", "echo", version_base="1.3") if PLAIN else hydra_main("echo_conf", "echo")


def rank() -> int:
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


@decorate
def main(config: DictConfig) -> None:
    assert RANK_CONFIG not in os.environ, "the configuration came in it, and a program does not see it"
    if os.environ.get("ECHO_FIT") == "1":
        fit()
    logging.getLogger(__name__).info("rank %d was here", rank())
    values = OmegaConf.to_container(config, resolve=True)
    name = f"rank{rank()}-{Path(config.folder).name}.json"
    Path(os.environ["ECHO_TO"], name).write_text(json.dumps(values))


def fit() -> None:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    import lightning_lockstep  # noqa: F401  # a process that was sent only `main` knows no names of strategies yet

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).sum()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="lockstep_ddp",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.rand(8, 2), batch_size=2))


if __name__ == "__main__":
    main()
