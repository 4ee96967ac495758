"""ConsolidateCheckpoints: also writes the checkpoint folders of DeepSpeed as plain Lightning checkpoints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lightning_lockstep._lightning import Callback, LightningModule, ModelCheckpoint, Trainer
from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed.checkpoints.consolidation import consolidate
from lightning_lockstep.deepspeed.checkpoints.file_names import consolidated_name
from lightning_lockstep.deepspeed.checkpoints.files import is_checkpoint_folder
from lightning_lockstep.errors import ConfigurationError

_log = logging.getLogger(__name__)


class ConsolidateCheckpoints(Callback):
    """Writes the best and the last checkpoint folder of a fit as one plain file each, when the fit ends.

    ``best.ckpt/`` becomes ``best.consolidated.ckpt`` next to it, which loads without DeepSpeed. It holds the
    weights and the state of the loops; only the folder has the state of the optimizer. If DeepSpeed has
    written no folder, the callback does nothing. A folder that cannot be consolidated, such as one whose parts are
    on the disks of several nodes, does not end the run: a warning shows the command to run.

    Args:
        dtype: ``float32``, or ``as_saved`` for the number formats of the model.

    Raises:
        ConfigurationError: ``dtype`` is neither.

    Ranks: every rank has one; rank 0 works while the others go on, and nothing is sent.
    """

    def __init__(self, dtype: Literal["float32", "as_saved"] = "float32") -> None:
        super().__init__()
        faults = Faults("ConsolidateCheckpoints")
        faults.choice("dtype", dtype, ("float32", "as_saved"))
        faults.raise_all()
        self.dtype: Literal["float32", "as_saved"] = dtype

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files."""
        if not trainer.is_global_zero:
            return
        for folder in dict.fromkeys(_folders(trainer)):
            self._consolidate(folder)

    def _consolidate(self, folder: Path) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # about state that only the folder can hold
                written = consolidate(folder, consolidated_name(folder), dtype=self.dtype)
        except ConfigurationError as error:
            _log.warning(f"{error} Once that is fixed, run: lockstep-consolidate {folder}")
        else:
            _log.info(f"{folder.name} is also in {written}, which loads without DeepSpeed")


def _folders(trainer: Trainer) -> Iterator[Path]:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            for path in (callback.best_model_path, callback.last_model_path):
                if path and is_checkpoint_folder(path):
                    yield Path(path)
