"""Lightning's own classes under the names that the Hydra configs use.

A `_target_` has to name one class, but Lightning is published as two packages whose classes are distinct.
These are the ones of the package that the program uses (see `lightning_lockstep._lightning`). `WandbLogger` and
`MLFlowLogger` are Lightning's with other defaults (see `lightning_lockstep.logs.trackers`).
"""

from __future__ import annotations

from lightning_lockstep._lightning import (
    CSVLogger,
    LearningRateMonitor,
    ModelCheckpoint,
    TensorBoardLogger,
    Trainer,
)
from lightning_lockstep.logs.trackers import MLFlowLogger, WandbLogger

__all__ = [
    "CSVLogger",
    "LearningRateMonitor",
    "MLFlowLogger",
    "ModelCheckpoint",
    "TensorBoardLogger",
    "Trainer",
    "WandbLogger",
]
