"""What DeepSpeed's configuration needs to know of a run that begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_lockstep._lightning import TrainerFn
from lightning_lockstep._lightning.internals import data_source
from lightning_lockstep.deepspeed.configuration.trainer_values import TrainerValues

__all__ = ["run_values"]

_CLIPPED_BY_NORM = "norm"
_OF_OPTIMIZER = ("lr", "betas", "eps", "weight_decay")


def run_values(
    trainer: Any, config: Mapping[str, Any], *, precision: str, world_size: int, accumulation_given: bool
) -> TrainerValues:
    """Return the values of a Trainer whose run begins.

    Loader and optimizer are asked only where the configuration needs them, since that calls the user's hooks.

    Args:
        trainer: The Trainer.
        config: DeepSpeed's configuration as the user gave it.
        precision: Of the run.
        world_size: Number of ranks.
        accumulation_given: Whether the user has given the Trainer ``accumulate_grad_batches``.

    Ranks: every rank; nothing is sent.
    """
    fits = trainer.state.fn == TrainerFn.FITTING
    algorithm, accumulation = trainer.gradient_clip_algorithm, trainer.accumulate_grad_batches
    return TrainerValues(
        precision=precision,
        accumulate_grad_batches=accumulation if accumulation_given or accumulation != 1 else None,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=None if algorithm is None else str(getattr(algorithm, "value", algorithm)),
        batch_size=_batch_size(trainer) if fits and _names_batch_size(config) else None,
        world_size=world_size,
        total_steps=_total_steps(trainer) if fits and "auto" in _params(config, "scheduler") else None,
        optimizer_defaults=_optimizer_defaults(trainer)
        if fits and "auto" in _params(config, "optimizer")
        else None,
        hidden_size=_hidden_size(trainer.lightning_module),
    )


def _names_batch_size(config: Mapping[str, Any]) -> bool:
    return "train_micro_batch_size_per_gpu" in config or "train_batch_size" in config


def _params(config: Mapping[str, Any], block: str) -> list[Any]:
    return list(((config.get(block) or {}).get("params") or {}).values())


def _batch_size(trainer: Any) -> int | None:
    """Return the size of the batches of the training loader, if it has one loader and says so."""
    source = data_source(trainer.fit_loop)
    if not source.is_defined():
        return None
    loader = source.dataloader()
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def _total_steps(trainer: Any) -> int | None:
    steps = trainer.estimated_stepping_batches
    return int(steps) if steps != float("inf") and steps > 0 else None


def _optimizer_defaults(trainer: Any) -> dict[str, Any] | None:
    """Return the options of the first optimizer that the module makes; nothing where it makes none."""
    made = next(_optimizers(trainer.lightning_module.configure_optimizers()), None)
    if made is None:
        return None
    return {name: made.defaults[name] for name in _OF_OPTIMIZER if name in made.defaults}


def _optimizers(made: Any) -> Iterator[Any]:
    if hasattr(made, "param_groups"):
        yield made
    elif isinstance(made, Mapping):
        yield from _optimizers(made.get("optimizer"))
    elif isinstance(made, (list, tuple)):
        for one in made:
            yield from _optimizers(one)


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
