"""Model, data and Trainer made from a configuration, with everything that their constructors refuse."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import hydra.utils
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lightning_lockstep._application.values import (
    SPECIAL,
    setting_faults,
    shown,
    target_nodes,
    target_of,
    trace,
)
from lightning_lockstep._lightning import LightningEnvironment, Logger, MisconfigurationException
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import first_line
from lightning_lockstep.errors import ConfigurationError, LaunchError

# What a user's settings lead to, as opposed to a bug, whose traceback is wanted.
_ABOUT_SETTINGS = (ConfigurationError, LaunchError, MisconfigurationException, ValueError, ImportError)
# Constructors of these packages check their arguments and have no other effect, but for those of loggers.
_HARMLESS = ("lightning_lockstep.", "lightning.pytorch.", "pytorch_lightning.")


def component_keys(config: DictConfig) -> list[str]:
    """Return the keys of everything that `build` makes, in the order in which it is made."""
    several = [
        f"{group}.{name}"
        for group in ("callbacks", "checkpoint", "logger")
        for name in names_in(config, group)
    ]
    return ["data", "model", *several, "strategy", "trainer"]


def names_in(config: DictConfig, group: str) -> list[str]:
    """Return the names of the components in a group of which there may be several."""
    node = config.get(group)
    if not isinstance(node, DictConfig):
        return []
    return [str(name) for name in node if node[name] is not None and not str(name).startswith("_")]


def build(config: DictConfig, *, own_callbacks: list[Any]) -> tuple[Any, Any, Any]:
    """Make model, data and Trainer, in the run itself; raise all that is wrong as one error."""
    parts, faults = _made(config, component_keys(config), own_callbacks=own_callbacks)
    if faults:
        raise ConfigurationError(faults)
    return parts["model"], parts["data"], parts["trainer"]


def component_faults(config: DictConfig, only: Collection[str] | None, *, construct: bool) -> list[str]:
    """What is wrong with settings of components, and, unless nothing is so far, what their constructors refuse."""
    # construct: something is wrong already.
    # only: the keys that are given, of which others than those of components may reach any component.
    keys = component_keys(config)
    if only is not None and {key.partition(".")[0] for key in keys}.issuperset(only):
        keys = [key for key in keys if key.partition(".")[0] in only]
    with _quiet():
        return _made(config, keys, is_check=True, construct=construct)[1]


def _made(
    config: DictConfig,
    keys: list[str],
    *,
    own_callbacks: Collection[Any] = (),
    is_check: bool = False,
    construct: bool = True,
) -> tuple[dict[str, Any], list[str]]:
    """Make components in their order, loggers and Trainer last, for what they are and for what they refuse."""
    parts: dict[str, Any] = {}
    wrong = {key: setting_faults(config, key) for key in keys}
    faults = [fault for found in wrong.values() for fault in found.values()]
    # Making a logger may begin a run, so it is the last, and left out if anything is wrong.
    for key in sorted(keys, key=lambda key: (key == "trainer", key.startswith("logger."))):
        node = OmegaConf.select(config, key)
        given: Mapping[str, Any] = {}
        if not (construct or faults) or (key.startswith("logger.") and faults):
            continue
        if key == "trainer":
            given = _stand_ins() if faults or is_check else _arguments(config, parts, own_callbacks)
        if not isinstance(node, DictConfig):
            parts[key] = node  # a name that Lightning knows
        elif f"{key}._target_" in wrong[key] or (wrong[key] and not is_check):
            pass
        elif "_target_" not in node:
            near = did_you_mean(key, [other for other in keys if other != key])
            faults.append(f"{key} has no _target_, so no object can be created from it.{near}")
        elif not is_check or all(_is_harmless(target_of(inner)) for _, inner in target_nodes(node)):
            parts[key] = _make(config, key, wrong[key], given, faults, is_check)
    return parts, faults


def _arguments(config: DictConfig, parts: dict[str, Any], own_callbacks: Collection[Any]) -> dict[str, Any]:
    """What the Trainer is given from other groups."""
    callbacks = [part for key, part in parts.items() if key.startswith(("callbacks.", "checkpoint."))]
    loggers = [part for key, part in parts.items() if key.startswith("logger.")]
    given = {
        "callbacks": [*callbacks, *own_callbacks],
        "logger": loggers or False,
        "strategy": parts["strategy"],
    }
    if config.trainer.get("enable_checkpointing") is None:
        given["enable_checkpointing"] = bool(names_in(config, "checkpoint"))
    return given


def _stand_ins() -> dict[str, Any]:
    # The Trainer checks devices, precision and loops. It is not told of ranks that others have started.
    return {"strategy": "auto", "logger": False, "plugins": [LightningEnvironment()]}


def _make(
    config: DictConfig,
    key: str,
    wrong: Collection[str],  # keys of settings that are left out
    given: Mapping[str, Any],
    faults: list[str],
    is_check: bool,
) -> Any:
    """Make one component; the Trainer, which stops at its first error, again without what it has refused."""
    node = OmegaConf.select(config, key)
    left_out = [name.removeprefix(f"{key}.") for name in wrong]
    while set(left_out) <= set(map(str, node)) - SPECIAL:
        try:
            if not (given or left_out):
                return hydra.utils.instantiate(node, _convert_="all")
            kept = OmegaConf.masked_copy(node, [name for name in map(str, node) if name not in left_out])
            kept._set_parent(node._get_parent())  # which a copy lacks, and its interpolations need
            factory = hydra.utils.instantiate(kept, _partial_=True, _convert_="all")
            return factory(**(_stand_ins() if given and left_out else given))
        except Exception as error:
            cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
            if not isinstance(cause, (*_ABOUT_SETTINGS, TypeError) if key == "trainer" else _ABOUT_SETTINGS):
                if is_check or left_out:
                    return None  # the run will show it; or it lacks what was left out
                raise
        said = cause.faults if isinstance(cause, ConfigurationError) else (first_line(cause),)
        named = [_setting_named(text, node) for text in said]
        for name, text in zip(named, said, strict=True):
            # About the default of a setting that was left out; or about a value that is judged where it was given.
            if name in left_out or (is_check and name is not None and OmegaConf.is_interpolation(node, name)):
                return None
            faults.append(_label(config, key, name, text))
            trace(cause)
        if key != "trainer" or named[0] is None:
            return None
        left_out.append(named[0])
    return None


def _setting_named(text: str, node: DictConfig) -> str | None:
    """The setting that an error is about: the first one that it names, such as `devices` in `Trainer(devices=0)`."""
    return next((word for word in re.findall(r"\w+", text) if word in node and word not in SPECIAL), None)


def _label(config: DictConfig, component: str, name: str | None, text: str) -> str:
    """Put the key in front of what a constructor says, in place of the `name=value` it may open with."""
    node = OmegaConf.select(config, component)
    text = text.removeprefix(f"{str(node['_target_']).rpartition('.')[2]}: ")
    if name is None:
        return f"{component}: {text}"
    return f"{shown(config, f'{component}.{name}')}: {text.removeprefix(f'{name}={node[name]!r}: ')}"


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
    return f"{getattr(target, '__module__', '')}.".startswith(_HARMLESS) and not is_logger(target)


def is_logger(target: object) -> bool:
    """Return whether this is a class of loggers: making one may begin a run."""
    return inspect.isclass(target) and issubclass(target, Logger)
