"""What is wrong with a command line, and how it is shown; settings compared with the signatures they are given to."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# The public hydra.utils.get_object logs each failure as an error.
from hydra._internal.utils import _locate as locate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import Unpack

from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import first_line, listed, say
from lightning_lockstep.launchers.hydra import inner_container

# -- What is wrong with a command line: a text each, with what was given, what was expected, how to fix it --


def show_faults(program: str, faults: Sequence[str], *, outcome: str = "nothing was started") -> None:
    count = "one error" if len(faults) == 1 else f"{len(faults)} errors"
    lines = [f"{program}: {count} in the configuration; {outcome}.", ""]
    for number, fault in enumerate(faults, 1):
        first, *rest = fault.splitlines() or [""]
        lines += [f"  {number}. {first}", *(f"     {line}" for line in rest)]
    say("\n".join([*lines, "", "HYDRA_FULL_ERROR=1 shows the exceptions behind this, if there are any."]))


def trace(error: BaseException) -> None:
    """Print the stack trace of an error of which only the text is kept, if the user asks for that."""
    if os.environ.get("HYDRA_FULL_ERROR", "0") == "1":
        traceback.print_exception(error)


# -- What is in a configuration --


def entries(container: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield whole key, container and name in it of all in a configuration, outermost first, but Hydra's own part."""
    for name in container if isinstance(container, DictConfig) else range(len(container)):
        if key or name != "hydra":
            whole = f"{key}.{name!s}" if key else str(name)
            yield whole, container, name
            inner = inner_container(container, name)
            if inner is not None:
                yield from entries(inner, whole)


def parts_of(key: str) -> list[str]:
    return [part for part in re.split(r"[.\[\]]", key) if part]


def target_nodes(config: DictConfig, key: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Yield key and node of everything with a `_target_`, outermost first."""
    inner = ((whole, inner_container(where, name)) for whole, where, name in entries(config, key))
    nodes = [(key, config), *inner]
    return ((key, node) for key, node in nodes if isinstance(node, DictConfig) and "_target_" in node)


def target_of(node: object) -> Callable[..., Any] | None:
    """Return what the `_target_` of a node names; `None` if it has none or that cannot be imported."""
    if not isinstance(node, DictConfig) or "_target_" not in node:
        return None
    try:
        target: Callable[..., Any] = locate(str(node["_target_"]))
    except Exception:  # importing a module can raise anything; it is reported where the target is checked
        return None
    return target


def typed_lines(config: DictConfig) -> list[str]:
    """The overrides of a job, with their references as they were typed; none without its `hydra` node."""
    lines = OmegaConf.select(config, "hydra.overrides.task")
    typed: Any = () if lines is None else OmegaConf.to_container(lines)
    return list(map(str, typed))


def unset_settings(node: DictConfig) -> list[str]:
    """The settings that a class of the user takes beside those in its node; of our classes all are there."""
    if str(node.get("_target_") or "").startswith("lightning_lockstep."):
        return []
    target = target_of(node)
    parameters = None if target is None else _parameters(target)
    return [name for name in parameters or () if name not in node]


def shown(config: DictConfig, key: str) -> str:
    """Return a key with its value, as it would be typed."""
    try:
        value = OmegaConf.select(config, key, throw_on_missing=False)
    except OmegaConfBaseException:
        return key
    return f"{key}={value}" if isinstance(value, (str, int, float, bool)) else key


# -- Do the values fit the signatures of what they are given to? --

SPECIAL = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


def setting_faults(config: DictConfig, component: str, *, references: bool) -> dict[str, str]:
    """What is missing below a component, is no setting of its target, or certainly of another type, by key."""
    node = OmegaConf.select(config, component, throw_on_missing=False)
    if not isinstance(node, DictConfig):
        return {}
    faults = {}
    for key, where, name in entries(node, component):
        if OmegaConf.is_missing(where, name):
            example = "module.Class" if name == "_target_" else "..."
            faults[key] = f"{key} is required: add {key}={example}"
        elif references and OmegaConf.is_interpolation(where, name):
            try:
                _ = where[name]
            except OmegaConfBaseException:
                # _get_node, because the public ways resolve an interpolation instead of showing it.
                reference = where._get_node(name)._value()
                text = f"takes its value from {reference}, but this configuration has no such key."
                faults[key] = f"{key}: {text}"
    for key, inner in target_nodes(node, component):
        if f"{key}._target_" in faults:
            continue
        name = str(inner["_target_"])
        try:
            target = locate(name)
        except Exception as error:  # importing a module can raise anything; all of it is reported
            text = f"{name} cannot be imported.{_why_not_found(name, error.__cause__ or error)}"
            faults[f"{key}._target_"] = f"{shown(config, f'{key}._target_')}: {text}"
            trace(error)
            continue
        if not callable(target):
            text = f"expected a class or a function, not a {type(target).__name__}."
            faults[f"{key}._target_"] = f"{shown(config, f'{key}._target_')}: {text}"
            continue
        for name, text in _unfit(key, inner, target, is_whole=key == component):
            whole = f"{key}.{name}"
            faults.setdefault(whole, f"{shown(config, whole)}: {text}")
    return faults


def _unfit(key: str, node: DictConfig, target: Callable[..., Any], *, is_whole: bool) -> Iterator[tuple[str, str]]:
    """What is wrong with a setting, by its name; is_whole: those without a default must be there."""
    parameters = _parameters(target)
    if parameters is None:
        return
    called = getattr(target, "__name__", str(target))
    names = [name for name in map(str, node) if name not in SPECIAL]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name, one in parameters.items() if is_whole and "_args_" not in node else ():
        if one.default is one.empty and one.kind in kinds and name not in names:
            yield name, f"{called} needs it: add +{key}.{name}=..."
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name in [] if takes_any else [name for name in names if name not in parameters]:
        takes = did_you_mean(name, parameters) or f" It takes {listed(list(parameters), 12)}."
        yield name, f"{called} has no setting {name!r}.{takes}"
    hints = _hints(target)
    for name in names:
        # The value of another key is judged where it is given.
        if not (OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name)):
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            expected = mismatch(node[name], hints.get(name), default=default)
            if expected is not None:
                yield name, expected


def mismatch(value: Any, hint: Any, *, default: Any = inspect.Parameter.empty) -> str | None:
    """Say what was expected if a value does not fit a type of numbers, text, truth, null and fixed values."""
    if value is default or isinstance(value, (DictConfig, ListConfig)):
        return None
    words: list[str] = []
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for member in typing.get_args(hint) if is_union else (hint,):
        choices = typing.get_args(member) if typing.get_origin(member) is typing.Literal else ()
        if not choices and member not in _WORDS:
            return None  # only its own constructor can tell
        if value in choices or member is type(value) or (member is float and type(value) is int):
            return None
        words += map(repr, choices) if choices else [_WORDS[member]]
    fixed = [word.strip("'") for word in words if word.startswith("'")]
    near = did_you_mean(value, fixed) if isinstance(value, str) else ""
    *others, last = dict.fromkeys(words)
    return f"expected {', '.join(others)}{' or ' if others else ''}{last}.{near}"


@cache
def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None  # written in C without a signature


@cache
def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        hints = typing.get_type_hints(inspect.unwrap(function))
        for options in [one for one in hints.values() if typing.get_origin(one) is Unpack]:
            hints |= typing.get_type_hints(*typing.get_args(options))
        return hints
    except (NameError, TypeError, AttributeError):
        return {}  # annotations that exist for type checkers only


def _why_not_found(name: str, cause: BaseException) -> str:
    """Why a target cannot be imported, and what may help."""
    module, (place, _, wrong) = name.partition(".")[0], name.rpartition(".")
    if isinstance(cause, ModuleNotFoundError) and cause.name == module:
        hint = f"Expected module.Class; start in the folder of {module}.py, or add that folder to PYTHONPATH."
        return f" There is no module {module!r} for a run that starts in {Path.cwd()}. {hint}"
    beside: list[str] = []
    with suppress(Exception):  # importing a module can raise anything; then there is nothing to compare
        owner = locate(place)
        beside = [other for other in getattr(owner, "__all__", dir(owner)) if other != wrong]
    return did_you_mean(wrong, beside) or f" {first_line(cause)}"


def is_left_out() -> bool:
    """Whether Python is told not to import from the folder where it is started; it heeds that from 3.11."""
    return bool(getattr(sys.flags, "safe_path", False) or os.environ.get("PYTHONSAFEPATH"))
