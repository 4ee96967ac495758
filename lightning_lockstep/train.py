"""`lockstep-train`: the Hydra application that trains a model on one or many ranks, and its parts for other programs.

`docs/hydra.md` says how both are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lockstep._application.entry import hydra_main

if TYPE_CHECKING:
    from collections.abc import Collection

    from omegaconf import DictConfig

__all__ = ["check_training", "hydra_main", "main", "prepare_training", "train"]

# What these do imports torch and Lightning, for seconds: not for `--help`, or a key that is misspelt.


def check_training(config: DictConfig, only: Collection[str] | None = None) -> list[str]:
    """Check the configuration of one training run: on rank 0, before others start.

    Args:
        config: The configuration with its `hydra` node.
        only: If the command line has errors already, the keys on the first level that it gives and that are right:
            only components below them are looked at, and nothing is tried on this machine.

    Returns:
        The errors found.

    Ranks: rank 0, before any other is started.
    """
    from lightning_lockstep._application.checks import check_training

    return check_training(config, only)


def prepare_training(config: DictConfig) -> None:
    """Decide on rank 0, for all ranks, what depends on this machine: the checkpoint and the devices.

    Args:
        config: The configuration of the job that begins, with its `hydra` node; changed.

    Ranks: rank 0 only; reads environment variables and looks for files.
    """
    from lightning_lockstep._application.checks import prepare_training

    prepare_training(config)


def train(config: DictConfig) -> float | None:
    """Run one training as configured: build, fit, validate, test, report.

    Args:
        config: The configuration of one run, without its `hydra` node.

    Returns:
        The last value of `objective.metric`, for a sweeper, if it was logged.

    Ranks: every rank of the run.
    """
    from lightning_lockstep._application.run import run

    return run(config)


@hydra_main("pkg://lightning_lockstep.conf", "lockstep_train", check=check_training, prepare=prepare_training)
def main(config: DictConfig) -> float | None:
    """Train as the command line says.

    Ranks: every rank of the run.
    """
    return train(config)


if __name__ == "__main__":
    main()
