"""The loaders of a run, changed alike on all ranks."""

from __future__ import annotations

import logging
from typing import Any

from lightning_lockstep._lightning import CombinedLoader, Trainer
from lightning_lockstep._lightning.internals import data_source
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.static_shapes.loaders import (
    evaluation_loader,
    fault_of_dropping,
    loader_that_drops,
    size_of,
)
from lightning_lockstep.static_shapes.settings import StaticShapesSettings
from lightning_lockstep.static_shapes.stages import ShapedStages

__all__ = ["loader_of_run", "stage_of"]

_log = logging.getLogger(__name__)


def stage_of(trainer: Trainer) -> str:
    """Return what a Trainer is at: ``training``, ``validation``, ``test`` or ``predict``."""
    if trainer.predicting or trainer.testing:
        return "predict" if trainer.predicting else "test"
    return "training" if trainer.training else "validation"


def loader_of_run(trainer: Trainer, loader: Any, settings: StaticShapesSettings, stages: ShapedStages) -> Any:
    """Return a loader as the settings want it, and note the size of its batches.

    Args:
        trainer: The Trainer, which makes its loaders.
        loader: One of them, with the sampler that gives this rank its share.
        settings: What to do.
        stages: Takes the size.

    Raises:
        ConfigurationError: The last batch of training cannot be dropped; alike on every rank.

    Ranks: all, together; one small reduction or gather.
    """
    stage = stage_of(trainer)
    if stage == "predict":
        return loader
    if stage == "training":
        stages.new_loader(stage, size_of(loader))
        return _dropping(loader) if settings.last_batch == "drop" else loader
    made = (
        _at_training_size(trainer, stage, loader, stages) if settings.evaluation_at_training_size else loader
    )
    stages.new_loader(stage, size_of(made))
    return made


def _dropping(loader: Any) -> Any:
    fault = fault_of_dropping(loader)
    faults = current_communicator().agree(fault is not None, fault or "")
    if faults:
        rank, reason = next(iter(faults.reasons.items()))
        raise ConfigurationError(f"StaticShapes on rank {rank}: {reason}.")
    return loader_that_drops(loader)


def _at_training_size(trainer: Trainer, stage: str, loader: Any, stages: ShapedStages) -> Any:
    """Give a loader the batch size of training, where all ranks then have the same number of batches."""
    size = _training_size(trainer, stages)
    made = None if size is None else evaluation_loader(loader, size)
    counts = current_communicator().gather(None if made is None else len(made))
    if None not in counts and len(set(counts)) == 1:
        return made
    if None not in counts and trainer.is_global_zero:
        _log.warning(
            "StaticShapes: %s keeps its batch size of %s. With that of training, %s, the ranks would have different"
            " numbers of batches: %s.",
            stage,
            size_of(loader),
            size,
            ", ".join(map(str, counts)),
        )
    return loader


def _training_size(trainer: Trainer, stages: ShapedStages) -> int | None:
    """Return the batch size of training, also before its loader is made."""
    known = stages.sizes.get("training")
    if known is None and trainer.state.fn is not None and trainer.state.fn.value == "fit":
        source = data_source(trainer.fit_loop)
        loaders = CombinedLoader(source.dataloader()).flattened if source.is_defined() else []
        known = size_of(loaders[0]) if loaders else None
    return known
