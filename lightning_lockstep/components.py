"""Lightning's own classes under the names that the Hydra configs use.

A `_target_` has to name one class, but Lightning is published as two packages whose classes are distinct.
These are the ones of the package that the program uses (see `lightning_lockstep._lightning`).
"""

from __future__ import annotations

from lightning_lockstep._lightning import (
    CSVLogger,
    LearningRateMonitor,
    ModelCheckpoint,
    TensorBoardLogger,
    Trainer,
)

__all__ = ["CSVLogger", "LearningRateMonitor", "ModelCheckpoint", "TensorBoardLogger", "Trainer"]
