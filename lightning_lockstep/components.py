"""What the Hydra configs name as a `_target_` in addition to the public classes.

A `_target_` has to name one class, but Lightning is published as two packages whose classes are distinct.
These are the ones of the package that the program uses (see `lightning_lockstep._lightning`). The two functions
make arguments of a Trainer that are no objects.
"""

from __future__ import annotations

from typing import Any

from lightning_lockstep._lightning import CSVLogger as CSVLogger
from lightning_lockstep._lightning import LearningRateMonitor as LearningRateMonitor
from lightning_lockstep._lightning import MLFlowLogger as MLFlowLogger
from lightning_lockstep._lightning import ModelCheckpoint as ModelCheckpoint
from lightning_lockstep._lightning import TensorBoardLogger as TensorBoardLogger
from lightning_lockstep._lightning import Trainer as Trainer
from lightning_lockstep._lightning import WandbLogger as WandbLogger


def as_list(**components: Any) -> list[Any]:
    """Return components as a list, in the order in which they stand in the configuration.

    Args:
        components: Each by its name; ``None`` is left out.

    Ranks: any rank, alone; nothing is sent.
    """
    return [component for component in components.values() if component is not None]


def strategy_name(name: str) -> str:
    """Return the name of a strategy that Lightning knows, such as ``auto``.

    Ranks: any rank, alone; nothing is sent.
    """
    return name
