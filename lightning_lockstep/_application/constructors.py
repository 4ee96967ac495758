"""One component of a configuration made by its constructor, or what that refuses, by the keys of the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import hydra.utils
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lightning_lockstep._application.signatures import SPECIAL, shown, trace
from lightning_lockstep._lightning import MisconfigurationException
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import first_line
from lightning_lockstep.errors import ConfigurationError, LaunchError

# What a user's settings lead to, as opposed to a bug, whose traceback is wanted.
_ABOUT_SETTINGS = (ConfigurationError, LaunchError, MisconfigurationException, ValueError, ImportError)
# Groups of which there may be several options, in the order in which they are made.
_SEVERAL = ("callbacks", "checkpoint", "logger")


class RefusedError(ConfigurationError):
    """What a constructor has refused: each fault with the setting that it is about, if it names one."""

    def __init__(self, faults: Sequence[str], settings: Sequence[str | None] = ()) -> None:
        super().__init__(faults)
        self.settings = settings


def component_keys(config: DictConfig) -> list[str]:
    """Return the keys of all components of a run, in the order in which they are made."""
    # Making a logger may begin a run, so it is left out if anything else is wrong.
    several = [f"{group}.{name}" for group in _SEVERAL for name in names_in(config, group)]
    return ["data", "model", "strategy", *several, "trainer"]


def names_in(config: DictConfig, group: str) -> list[str]:
    """Return the names of the components in a group of which there may be several."""
    node = config.get(group)
    if not isinstance(node, DictConfig):
        return []
    return [str(name) for name in node if node[name] is not None and not str(name).startswith("_")]


def make(
    config: DictConfig, key: str, given: Mapping[str, Any] | None = None, *, without: Sequence[str] = ()
) -> Any:
    """Make one component, with what it is given beside its settings; raise what its constructor refuses."""
    node = OmegaConf.select(config, key)
    if not isinstance(node, DictConfig):
        return node  # a name that Lightning knows
    if "_target_" not in node:
        near = did_you_mean(key, [other for other in component_keys(config) if other != key])
        raise RefusedError([f"{key} has no _target_, so no object can be created from it.{near}"], [None])
    try:
        kept = OmegaConf.masked_copy(node, [name for name in map(str, node) if name not in without])
        kept._set_parent(node._get_parent())  # which a copy lacks, and its interpolations need
        return hydra.utils.instantiate(kept, _partial_=True, _convert_="all")(**(given or {}))
    except Exception as error:
        cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
        if not isinstance(cause, (*_ABOUT_SETTINGS, TypeError) if key == "trainer" else _ABOUT_SETTINGS):
            raise
    trace(cause)
    said = cause.faults if isinstance(cause, ConfigurationError) else (first_line(cause),)
    # The setting that an error is about: the first one that it names, such as `devices` in `Trainer(devices=0)`.
    settings = set(map(str, node)) - SPECIAL
    named = [next(filter(settings.__contains__, re.findall(r"\w+", text)), None) for text in said]
    is_ours = isinstance(cause, ConfigurationError)
    faults = [_label(config, key, name, text, is_ours) for name, text in zip(named, said, strict=True)]
    raise RefusedError(faults, named) from cause


def _label(config: DictConfig, component: str, name: str | None, text: str, is_ours: bool) -> str:
    """Put the key in front of what a constructor says, in place of the `name=value` it may open with."""
    node = OmegaConf.select(config, component)
    text = text.removeprefix(f"{str(node['_target_']).rpartition('.')[2]}: ")
    if name is not None:
        return f"{shown(config, f'{component}.{name}')}: {text.removeprefix(f'{name}={node[name]!r}: ')}"
    # Its strategy refuses something, perhaps in DeepSpeed's configuration.
    if component == "trainer" and is_ours:
        inner = f"strategy.config.{re.split('[=:]', text)[0]}"
        return text if OmegaConf.select(config, inner) is None else f"strategy.config.{text}"
    return f"{component}: {text}"
