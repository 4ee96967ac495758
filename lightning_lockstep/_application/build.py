"""Model, data and Trainer made from a configuration, with everything that their constructors refuse."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import hydra.utils
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lightning_lockstep._application.signatures import (
    SPECIAL,
    shown,
    target_nodes,
    target_of,
    trace,
)
from lightning_lockstep._lightning import (
    Callback,
    LightningEnvironment,
    Logger,
    MisconfigurationException,
    is_overridden,
)
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import first_line
from lightning_lockstep.errors import ConfigurationError, LaunchError

# What a user's settings lead to, as opposed to a bug, whose traceback is wanted.
_ABOUT_SETTINGS = (ConfigurationError, LaunchError, MisconfigurationException, ValueError, ImportError)
# Groups of which there may be several options, in the order in which they are made.
_SEVERAL = ("callbacks", "checkpoint", "logger")
# Constructors of these packages check their arguments and have no other effect, but for those of loggers.
_HARMLESS = ("lightning_lockstep.", "lightning.pytorch.", "pytorch_lightning.")


class RefusedError(ConfigurationError):
    """What a constructor has refused: each fault with the setting that it is about, if it names one."""

    def __init__(self, faults: Sequence[str], settings: Sequence[str | None] = ()) -> None:
        super().__init__(faults)
        self.settings = settings


def component_keys(config: DictConfig) -> list[str]:
    """Return the keys of everything that `build` makes, in the order in which it is made."""
    # Making a logger may begin a run, so it is left out if anything else is wrong.
    several = [f"{group}.{name}" for group in _SEVERAL for name in names_in(config, group)]
    return ["data", "model", "strategy", *several, "trainer"]


def names_in(config: DictConfig, group: str) -> list[str]:
    """Return the names of the components in a group of which there may be several."""
    node = config.get(group)
    if not isinstance(node, DictConfig):
        return []
    return [str(name) for name in node if node[name] is not None and not str(name).startswith("_")]


def build(config: DictConfig, *, own_callbacks: list[Any]) -> tuple[Any, Any, Any]:
    """Make model, data and Trainer, in the run itself; raise all that is wrong as one error."""
    parts: dict[str, Any] = {}
    faults: list[str] = []
    for key in component_keys(config)[:-1]:
        if key.startswith("logger.") and faults:
            break
        try:
            parts[key] = make(config, key)
        except ConfigurationError as error:
            faults += error.faults
    faults = faults or _sharing_a_state(parts)
    if faults:
        raise ConfigurationError(faults)
    given = {
        "callbacks": [*(parts[key] for key in parts if key.startswith(_SEVERAL[:2])), *own_callbacks],
        "logger": [parts[key] for key in parts if key.startswith("logger.")] or False,
        "strategy": parts["strategy"],
    }
    if config.trainer.get("enable_checkpointing") is None:
        given["enable_checkpointing"] = bool(names_in(config, "checkpoint"))
    return parts["model"], parts["data"], make(config, "trainer", given)


def _sharing_a_state(parts: dict[str, Any]) -> list[str]:
    """Callbacks that keep their state in checkpoints under one name, as `EarlyStopping` and what replaces it do."""
    by_state: dict[str, str] = {}
    faults = []
    for key, part in parts.items():
        if isinstance(part, Callback) and is_overridden("state_dict", part, Callback):
            first = by_state.setdefault(part.state_key, key)
            if first != key:
                both = " and ".join(type(parts[one]).__name__ for one in (first, key))
                text = f"{first} and {key}: {both} keep their state under the same name {part.state_key}, because one"
                faults.append(f"{text} can replace the other. Leave one of them out, such as with ~{key}.")
    return faults


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


# -- What constructors refuse, before a run --


def refusals(config: DictConfig, key: str, wrong: Collection[str]) -> list[str]:
    """What a constructor of a component refuses, which is made without the settings that are known to be wrong."""
    node = OmegaConf.select(config, key)
    if not all(_is_harmless(target_of(inner)) for _, inner in target_nodes(node)):
        return []
    without = [name.removeprefix(f"{key}.") for name in wrong]
    faults: list[str] = []
    # The Trainer checks devices, precision and loops, stops at its first error, and is made again without what it has
    # refused. It is not told of ranks that others have started.
    stand_ins = {"strategy": "auto", "logger": False, "plugins": [LightningEnvironment()]}
    while set(without) <= set(map(str, node)) - SPECIAL:
        try:
            with _quiet():
                make(config, key, stand_ins if key == "trainer" else None, without=without)
            break
        except RefusedError as error:
            for name, fault in zip(error.settings, error.faults, strict=True):
                # About the default of a setting that was left out; or about a value that is judged where it was given.
                if name in without or (name is not None and OmegaConf.is_interpolation(node, name)):
                    return faults
                faults.append(fault)
            if key != "trainer" or error.settings[0] is None:
                break
            without.append(error.settings[0])
        except Exception:  # the run will show it; or it lacks what was left out
            break
    return faults


@contextmanager
def _quiet() -> Iterator[None]:
    """Make components without the logs and warnings of their constructors, for errors alone."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _is_harmless(target: object) -> bool:
    begins_a_run = inspect.isclass(target) and issubclass(target, Logger)
    return f"{getattr(target, '__module__', '')}.".startswith(_HARMLESS) and not begins_a_run
