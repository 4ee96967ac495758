"""The loaders of a run: what they say of their batches, and how they are changed alike on all ranks."""

from __future__ import annotations

import logging
from typing import Any

from lightning_lockstep._console import say
from lightning_lockstep._lightning import CombinedLoader, Trainer, TrainerFn
from lightning_lockstep._lightning.internals import data_source, joins_batches, loaders_in_use
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

__all__ = ["batch_size_in_use", "loader_of_run", "refuse_joined_batches", "stage_of"]

_log = logging.getLogger(__name__)


def stage_of(trainer: Trainer) -> str:
    """Return what a Trainer is at: ``training``, ``validation``, ``test`` or ``predict``."""
    if trainer.predicting or trainer.testing:
        return "predict" if trainer.predicting else "test"
    return "training" if trainer.training else "validation"


def batch_size_in_use(trainer: Trainer, stage: str, dataloader_idx: int) -> int | None:
    """Return how many samples the batches of a loader of the run have, or ``None`` where it does not say."""
    return size_of(loaders_in_use(_loop_of(trainer, stage))[dataloader_idx])


def refuse_joined_batches(trainer: Trainer, stage: str, option: str) -> None:
    """Refuse to pad batches made of batches of several loaders, each with its own number of samples."""
    if joins_batches(_loop_of(trainer, stage)):
        raise ConfigurationError(
            f"StaticShapes({option}='pad') with several loaders of {stage} at once: expected one, as there is one mask"
            f" for a batch, and its parts have different numbers of samples. Give {option}="
            f"{'drop' if stage == 'training' else 'keep'!r}."
        )


def _loop_of(trainer: Trainer, stage: str) -> Any:
    if stage == "validation" and trainer.state.fn == TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop
    name = {"training": "fit", "validation": "validate"}.get(stage, stage)
    return getattr(trainer, f"{name}_loop")


def loader_of_run(trainer: Trainer, loader: Any, settings: StaticShapesSettings, stages: ShapedStages) -> Any:
    """Return a loader as the settings want it, which all ranks ask for together."""
    stage = stage_of(trainer)
    if stage == "training" and settings.last_batch == "drop":
        return _dropping(loader)
    if stage in ("validation", "test") and settings.evaluation_at_training_size:
        return _at_training_size(trainer, stage, loader, stages)
    return loader


def _dropping(loader: Any) -> Any:
    fault = fault_of_dropping(loader)
    faults = current_communicator().agree(fault is not None, fault or "")
    if faults:
        rank, reason = next(iter(faults.reasons.items()))
        raise ConfigurationError(f"StaticShapes on rank {rank}: {reason}.")
    return loader_that_drops(loader)


def _at_training_size(trainer: Trainer, stage: str, loader: Any, stages: ShapedStages) -> Any:
    """Give a loader the batch size of training, where every rank then evaluates what it would have evaluated."""
    size = None if _limits_batches(trainer, stage) else _training_size(trainer, stages)
    made = None if size is None else evaluation_loader(loader, size)
    counts = current_communicator().gather(None if made is None else len(made))
    if made is None or None in counts:
        return loader
    if len(set(counts)) > 1:
        if trainer.is_global_zero:
            _log.warning(
                "StaticShapes: %s keeps its batch size of %s. With that of training, %s, the ranks would have different"
                " numbers of batches: %s.",
                stage,
                size_of(loader),
                size,
                ", ".join(map(str, counts)),
            )
        return loader
    text = (
        f"StaticShapes: {stage} takes {size} samples at once instead of {size_of(loader)}, as training does"
    )
    if size != size_of(loader) and trainer.is_global_zero and text not in stages.announced:
        stages.announced.add(text)
        say(f"{text} (evaluation_at_training_size).")
    return made


def _limits_batches(trainer: Trainer, stage: str) -> bool:
    """Return whether an evaluation is to take a number or a part of its batches, of which the size then matters."""
    limit = trainer.limit_test_batches if stage == "test" else trainer.limit_val_batches
    return isinstance(limit, int) or limit < 1.0


def _training_size(trainer: Trainer, stages: ShapedStages) -> int | None:
    """Return the batch size of training, also before its loader is made."""
    if trainer.train_dataloader is not None:
        return size_of(loaders_in_use(trainer.fit_loop)[0])
    if stages.training_size is None and trainer.state.fn == TrainerFn.FITTING:
        source = data_source(trainer.fit_loop)
        loaders = CombinedLoader(source.dataloader()).flattened if source.is_defined() else []
        stages.training_size = size_of(loaders[0]) if loaders else None
    return stages.training_size
