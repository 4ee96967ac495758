"""Leaves out of the output what is for the developers of other packages, or for nobody."""

from __future__ import annotations

import logging
import warnings

from lightning_lockstep._lightning import Callback
from lightning_lockstep.launchers.environments.slurm_environment import hide_srun_hint

__all__ = ["QuietRanks", "leave_out_noise"]

# How messages of Lightning begin that say nothing about the run.
_NOISE = (
    "💡 Tip",
    "GPU available: False",
    "TPU available: False",
    "Restoring states from the checkpoint path",
    "Restored all states from the checkpoint",
    "Loaded model weights from the checkpoint",
    "`weights_only` was not set",
    "Loading `train_dataloader` to estimate",
    "Experiment with name",  # MLflow's, which is made where it is missing
)
_LOGGERS = tuple(
    f"{family}.{module}"
    for family in ("lightning.pytorch", "pytorch_lightning")
    for module in ("utilities.rank_zero", "trainer.connectors.checkpoint_connector", "loggers.mlflow")
)
# Loggers that say how MLflow makes its file, and how DeepSpeed tries a compiler.
_TALKATIVE = ("mlflow.store", "alembic", "compilers")
_THEIRS = r"(lightning|pytorch_lightning|torch|hydra|omegaconf)\."


class _NoNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message is for readers."""
        return not record.getMessage().startswith(_NOISE)


_FILTER = _NoNoise()


def leave_out_noise() -> None:
    """Show neither advertisements, nor deprecations inside other packages, nor messages without news."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=_THEIRS)
    warnings.filterwarnings("ignore", message=r"Checkpoint directory .* exists and is not empty")
    hide_srun_hint()


class QuietRanks(Callback):
    """Takes :func:`leave_out_noise` along to ranks that are spawned, which get a copy of every callback."""

    def __init__(self) -> None:
        leave_out_noise()

    def __reduce__(self) -> tuple[type[QuietRanks], tuple[()]]:
        return QuietRanks, ()  # without a state a copy would be made without any call
