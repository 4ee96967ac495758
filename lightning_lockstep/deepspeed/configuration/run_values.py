"""What DeepSpeed's configuration needs to know of a run that begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_lockstep._lightning.internals import data_source
from lightning_lockstep.deepspeed.configuration.trainer_values import TrainerValues

__all__ = ["run_values", "total_steps"]


def run_values(
    trainer: Any, config: Mapping[str, Any], *, precision: str, world_size: int, accumulation: int | None
) -> TrainerValues:
    """Return the values of a Trainer whose fit begins, but for those that depend on the accumulation.

    The loader is asked only where the configuration needs it, since that calls the user's hooks.
    """
    algorithm = trainer.gradient_clip_algorithm
    return TrainerValues(
        precision=precision,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=None if algorithm is None else str(getattr(algorithm, "value", algorithm)),
        batch_size=_batch_size(trainer) if _names_batch_size(config) else None,
        world_size=world_size,
        hidden_size=_hidden_size(trainer.lightning_module),
    )


def total_steps(trainer: Any) -> int | None:
    """Return the optimizer steps of a fit by the Trainer's accumulation; ``None`` where nobody knows."""
    steps = trainer.estimated_stepping_batches  # makes the loaders, on all ranks together
    return int(steps) if steps != float("inf") and steps > 0 else None


def _names_batch_size(config: Mapping[str, Any]) -> bool:
    return "train_micro_batch_size_per_gpu" in config or "train_batch_size" in config


def _batch_size(trainer: Any) -> int | None:
    """Return the size of the batches of the training loader, if it has one loader and says so."""
    source = data_source(trainer.fit_loop)
    if not source.is_defined():
        return None
    loader = source.dataloader()
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def _hidden_size(module: Any) -> int | None:
    """Return the hidden size that a model of Transformers inside the module states, if there is one."""
    for one in module.modules():
        config = getattr(one, "config", None)
        for holder in (config, getattr(config, "text_config", None)):
            sizes = getattr(holder, "hidden_sizes", None)
            size = getattr(holder, "hidden_size", None) or (max(sizes) if sizes else None)
            if isinstance(size, int):
                return size
    return None
