"""Builds what one training run consists of, and says everything that is wrong with its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hydra.utils
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lightning_lockstep._application.command_line.targets import objections, target_of
from lightning_lockstep._application.tracking import is_logger, missing_package
from lightning_lockstep._lightning import MisconfigurationException
from lightning_lockstep.errors import ConfigurationError

# What a user's settings lead to, as opposed to a bug, whose traceback is wanted.
_ABOUT_SETTINGS = (ConfigurationError, MisconfigurationException, ValueError, ImportError)


@dataclass(frozen=True)
class Components:
    """What one training run consists of."""

    model: Any
    data: Any
    trainer: Any


def component_keys(config: DictConfig) -> list[str]:
    """Keys of everything that `build` makes, in the order in which it is made."""
    several = [
        f"{group}.{name}" for group in ("callbacks", "checkpoint", "logger") for name in _names(config, group)
    ]
    return ["data", "model", *several, "strategy", "trainer"]


def _names(config: DictConfig, group: str) -> list[str]:
    node = config.get(group)
    if not isinstance(node, DictConfig):
        return []
    return [str(name) for name in node if node[name] is not None and not str(name).startswith("_")]


def build(config: DictConfig, *, own_callbacks: list[Any]) -> Components:
    """Make model, data and Trainer."""
    faults: list[str] = []
    made = {key: _make(key, _node(config, key), faults) for key in component_keys(config) if key != "trainer"}
    callbacks = [made[key] for key in made if key.startswith(("callbacks.", "checkpoint."))]
    loggers = [made[key] for key in made if key.startswith("logger.")]
    given = {
        "callbacks": [*callbacks, *own_callbacks],
        "logger": loggers or False,
        "strategy": made["strategy"],
    }
    if config.trainer.get("enable_checkpointing") is None:
        given["enable_checkpointing"] = bool(_names(config, "checkpoint"))
    trainer = None
    if not faults:
        factory = hydra.utils.instantiate(config.trainer, _partial_=True, _convert_="all")
        trainer = _attempt("trainer", lambda: factory(**given), faults)
    if faults:
        raise ConfigurationError(faults)
    return Components(made["model"], made["data"], trainer)


def _node(config: DictConfig, key: str) -> Any:
    return OmegaConf.select(config, key)


def _make(key: str, node: Any, faults: list[str]) -> Any:
    if not isinstance(node, DictConfig):
        return node  # a name that Lightning knows
    if "_target_" not in node:
        faults.append(f"{key} has no _target_, so no object can be created from it.")
        return None
    target = target_of(node)
    missing = missing_package(target, key, node) if is_logger(target) else None
    if missing is not None:
        faults.append(str(missing))
        return None
    return _attempt(key, lambda: hydra.utils.instantiate(node, _convert_="all"), faults)


def _attempt(key: str, make: Callable[[], Any], faults: list[str]) -> Any:
    try:
        return make()
    except (HydraException, *_ABOUT_SETTINGS) as error:
        if not isinstance(error.__cause__ or error, _ABOUT_SETTINGS):
            raise
        faults += [f"{key}: {text}" for text, _ in objections(error)]
        return None
