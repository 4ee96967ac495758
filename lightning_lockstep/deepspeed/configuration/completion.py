"""A config that is complete: what it leaves open is filled in from the Trainer, the loader or the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_lockstep._settings import Faults, is_number, is_whole
from lightning_lockstep.deepspeed.configuration.known_keys import is_comment
from lightning_lockstep.deepspeed.configuration.reading import (
    AUTO,
    is_given,
    modern_spelling,
    section,
    stage_of,
)
from lightning_lockstep.deepspeed.configuration.trainer_values import (
    PRECISION_OF,
    PRECISIONS,
    TrainerValues,
    batch_of,
)

__all__ = ["completed"]

_NEVER = 10**12  # steps between two prints of DeepSpeed

# Sections that DeepSpeed reads with its own models, which take "auto" for "the default"; and places where it is the
# default itself.
_AUTO_IS_DEFAULT = (
    "zero_optimization",
    "fp16",
    "bf16",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "comms_logger",
    "compile",
    "hybrid_engine",
    "tensor_parallel",
    "timers",
    "weight_quantization",
    "expert_parallel",
    "pipeline",
    "data_types",
)


def completed(config: Mapping[str, Any], values: TrainerValues) -> dict[str, Any]:
    """Return a config that is complete: no ``"auto"``, and nothing left to defaults that differ from the Trainer's.

    Where the config says something, it stays. Keys that begin with an underscore, which are comments, are left out.
    """
    faults = Faults()
    full = _without_comments(modern_spelling(config))
    _fill_precision(full, values.precision)
    _fill_batch(full, values)
    _fill(full, "gradient_clipping", float(values.gradient_clip_val or 0.0))
    _fill(full, "zero_allow_untested_optimizer", True)
    _fill(full, "steps_per_print", _NEVER)
    _fill_optimizer(full, values)
    _fill_scheduler(full, values)
    _fill_buckets(full, values.hidden_size)
    for name in _AUTO_IS_DEFAULT:
        if isinstance(full.get(name), dict):
            full[name] = _without_auto(full[name])
    _refuse_auto(full, "", faults)
    faults.raise_all()
    return full


def _fill(config: dict[str, Any], key: str, value: object) -> None:
    if not is_given(config.get(key)):
        config[key] = value


def _fill_precision(config: dict[str, Any], precision: str | None) -> None:
    wanted = PRECISIONS.get(precision or "")
    for name in PRECISION_OF:
        if name == wanted and config.get(name) is None:
            config[name] = {}
        if config.get(name) is not None and isinstance(config[name], dict):
            _fill(config[name], "enabled", name == wanted)


def _fill_batch(config: dict[str, Any], values: TrainerValues) -> None:
    batch = batch_of(config, values).deduced()
    if batch.whole is not None and batch.ranks is None:
        # DeepSpeed, which knows the number of ranks, deduces what is missing.
        known = {
            "train_micro_batch_size_per_gpu": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
        }
    else:
        micro, accumulation = batch.micro or 1, batch.accumulation or 1
        known = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
        if batch.whole != micro * accumulation * (batch.ranks or 1):
            config.pop("train_batch_size", None)
    for key, size in known.items():
        if size is not None:
            _fill(config, key, size)
        elif not is_given(config.get(key)):
            config.pop(key, None)


def _fill_optimizer(config: dict[str, Any], values: TrainerValues) -> None:
    params = section(config, "optimizer").get("params")
    if isinstance(params, dict):
        _fill_auto(params, values.optimizer_defaults or {})


def _fill_scheduler(config: dict[str, Any], values: TrainerValues) -> None:
    params = section(config, "scheduler").get("params")
    if not isinstance(params, dict):
        return
    # Zero steps are refused by DeepSpeed from 0.19.6 on; before, it made two of them.
    known: dict[str, Any] = {"warmup_min_lr": 0, "warmup_num_steps": 1}
    lr = section(config, "optimizer", "params").get("lr", (values.optimizer_defaults or {}).get("lr"))
    if is_number(lr):
        known["warmup_max_lr"] = lr
    if is_whole(values.total_steps) and values.total_steps > 0:
        known["total_num_steps"] = values.total_steps
    _fill_auto(params, known)


def _fill_buckets(config: dict[str, Any], hidden_size: int | None) -> None:
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or hidden_size is None:
        return
    area = hidden_size * hidden_size
    sizes = {"reduce_bucket_size": area}
    if stage_of(config) == 3:
        sizes |= {"prefetch_bucket_size": int(0.9 * area), "param_persistence_threshold": 10 * hidden_size}
    _fill_auto(zero, sizes | {f"stage3_{name}": size for name, size in sizes.items()})


def _fill_auto(params: dict[str, Any], known: Mapping[str, Any]) -> None:
    for key, value in params.items():
        if value == AUTO and key in known:
            params[key] = list(known[key]) if isinstance(known[key], tuple) else known[key]


def _without_comments(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_comments(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not is_comment(key)
    }


def _without_auto(inner: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in inner.items()
        if value != AUTO
    }


def _refuse_auto(inner: Mapping[str, Any], path: str, faults: Faults) -> None:
    for key, value in inner.items():
        here = f"{path}{key}"
        if isinstance(value, Mapping):
            _refuse_auto(value, f"{here}.", faults)
        elif isinstance(value, str) and value == AUTO:
            faults.add(f"{here}='auto': {_instead_of_auto(here)}")


def _instead_of_auto(path: str) -> str:
    if path == "scheduler.params.total_num_steps":
        return (
            "the number of steps is not known. Write a number, or give the Trainer max_steps, or max_epochs and a"
            " loader with a length."
        )
    if path.startswith("optimizer.params.") or path == "scheduler.params.warmup_max_lr":
        return "configure_optimizers returns no optimizer that has this setting. Write a number."
    return (
        "its value cannot be derived from the Trainer, the optimizer or the model. Set it, or remove the key to use"
        " DeepSpeed's default."
    )
