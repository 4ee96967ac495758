"""A research project's own program: its own model and data, everything else from lightning-lockstep.

python train.py
python train.py experiment=wine_two_ranks
torchrun --nproc-per-node 2 train.py
"""

from __future__ import annotations

from omegaconf import DictConfig

from lightning_lockstep.train import check_training, hydra_main, prepare_training, train


@hydra_main("conf", "config", check=check_training, prepare=prepare_training)
def main(config: DictConfig) -> float | None:
    """Train as the command line says; `config` is the same on every rank."""
    return train(config)


if __name__ == "__main__":
    main()
