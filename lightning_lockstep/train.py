"""`lockstep-train`: the Hydra application that trains a model on one or many ranks.

    lockstep-train strategy=ddp trainer.devices=2
    lockstep-train data=source_text model=byte_gpt trainer.max_steps=50
    torchrun --nproc-per-node 2 -m lightning_lockstep.train trainer.max_epochs=1

See `docs/hydra.md`. A program of your own builds on the same parts:

    from lightning_lockstep._application.entry import hydra_main
    from lightning_lockstep._application.run import run as train

    @hydra_main(config_path="conf", config_name="config")
    def main(config):
        train(config)
"""

from __future__ import annotations

from omegaconf import DictConfig

from lightning_lockstep._application.checks import check_training, prepare_training
from lightning_lockstep._application.entry import hydra_main
from lightning_lockstep._application.run import run as train

__all__ = ["check_training", "hydra_main", "main", "prepare_training", "train"]


@hydra_main("pkg://lightning_lockstep.conf", "lockstep_train", check=check_training, prepare=prepare_training)
def main(config: DictConfig) -> float | None:
    """Train as the command line says.

    Ranks: every rank of the run, alike.
    """
    return train(config)


if __name__ == "__main__":
    main()
