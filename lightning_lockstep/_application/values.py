"""Values of a configuration compared with the signatures of what they configure; what is wrong, and how it is shown."""

from __future__ import annotations

import enum
import inspect
import os
import pkgutil
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

# The public hydra.utils.get_object logs each failure as an error.
from hydra._internal.utils import _locate as locate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import first_line, say
from lightning_lockstep.launchers.hydra import inner_container

# -- One thing that is wrong with a command line, and how several are shown --


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    text: str  # what was given, what was expected, how to fix it
    # Shown only to those who ask for stack traces.
    error: BaseException | None = field(default=None, compare=False)


def show_faults(
    program: str, faults: Sequence[Fault], *, stack_traces: bool, outcome: str = "nothing was started"
) -> None:
    """Print all errors as one message to standard error, after their stack traces if these are asked for."""
    if stack_traces:
        for fault in faults:
            if fault.error is not None:
                traceback.print_exception(fault.error)
    count = "one error" if len(faults) == 1 else f"{len(faults)} errors"
    lines = [f"{program}: {count} in the configuration; {outcome}.", ""]
    for number, fault in enumerate(faults, 1):
        first, *rest = fault.text.splitlines() or [""]
        lines += [f"  {number}. {first}", *(f"     {line}" for line in rest)]
    if not stack_traces and any(fault.error is not None for fault in faults):
        lines += ["", "HYDRA_FULL_ERROR=1 shows the exceptions behind this."]
    say("\n".join([*lines, ""]))


# -- Does a value from a config fit the type that a signature asks for? --

_PLAIN: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def mismatch(value: Any, hint: Any, *, default: Any = inspect.Parameter.empty) -> str | None:
    """Say in words what was expected, fixed values in quotes, if `value` certainly does not fit the type `hint`."""
    # Judged are numbers, text, true and false, null and fixed values, and unions of them; for anything else,
    # as for a value that fits, `None` is returned.
    if hint is None or hint is Any or (value is None and default is None):
        return None
    if isinstance(value, (DictConfig, ListConfig)):
        return None
    members = _members(hint)
    words: list[str] = []
    for member in members:
        if member in _PLAIN:
            if _fits(value, member):
                return None
            words.append(_PLAIN[member])
        elif member is type(None):
            if value is None:
                return None
            words.append("null")
        elif typing.get_origin(member) is typing.Literal:
            choices = typing.get_args(member)
            if value in choices:
                return None
            words += [repr(choice) for choice in choices if isinstance(choice, str)] or map(repr, choices)
        elif _is_rich(member) and not isinstance(value, str) and value is not None:
            words.append(_type_name(member))  # a number cannot be one of these
        else:
            return None
    if _PLAIN[float] in words:
        words = [word for word in words if word != _PLAIN[int]]
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} or {last}" if others else last


def _members(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [member for argument in typing.get_args(hint) for member in _members(argument)]
    return [hint]


def _fits(value: Any, plain: type) -> bool:
    if plain is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if plain is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, plain)


def _is_rich(member: Any) -> bool:
    """Whether `member` is a class that no plain value is an instance of."""
    origin = typing.get_origin(member) or member
    return (
        isinstance(origin, type)
        and not issubclass(origin, (int, float, str, bool, enum.Enum))
        and origin is not object
    )


def _type_name(member: Any) -> str:
    origin = typing.get_origin(member) or member
    return {list: "a list", dict: "a mapping", tuple: "a list"}.get(
        origin, getattr(origin, "__name__", str(origin))
    )


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


def target_nodes(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """Yield key and node of everything with a `_target_`, outermost first."""
    nodes = [("", config), *((key, inner_container(where, name)) for key, where, name in entries(config))]
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


def shown(config: DictConfig, key: str, typed: Mapping[str, str] | None = None) -> str:
    """Return a key as it was typed, or with its value."""
    if typed and key in typed:
        return typed[key]
    try:
        value = OmegaConf.select(config, key, throw_on_missing=False)
    except OmegaConfBaseException:
        return key
    return f"{key}={value}" if isinstance(value, (str, int, float, bool)) else key


def missing_faults(config: DictConfig, component: str) -> list[Fault]:
    """Values below `component` that have to be given and were not, or that refer to what is not there."""
    node = OmegaConf.select(config, component, throw_on_missing=False)
    if not isinstance(node, DictConfig):
        return []
    faults = []
    for key, where, name in entries(node, component):
        if OmegaConf.is_missing(where, name):
            example = "module.Class" if name == "_target_" else "..."
            faults.append(Fault(f"{key} is required: add {key}={example}"))
        elif OmegaConf.is_interpolation(where, name):
            try:
                _ = where[name]
            except OmegaConfBaseException as error:
                # _get_node, as the public ways resolve an interpolation instead of showing it.
                reference = where._get_node(name)._value()
                text = f"takes its value from {reference}, and this configuration has no such key."
                faults.append(Fault(f"{key}: {text}", error))
    return faults


# -- Do the values fit the signatures of what they are given to? --

SPECIAL = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})


def signature_faults(
    config: DictConfig, typed: Mapping[str, str], components: Sequence[str] | None = None
) -> dict[str, Fault]:
    """Settings that a target does not have, and values of a type that it does not take, by key."""
    # typed: the override of a key, as it was typed; components: to look at these alone.
    faults: dict[str, Fault] = {}
    for key, node in target_nodes(config):
        if components is not None and not f"{key}.".startswith(tuple(f"{one}." for one in components)):
            continue
        try:
            target = locate(str(node["_target_"]))
        except OmegaConfBaseException:
            continue  # it is missing, which is reported as such
        except Exception as error:  # importing a module can raise anything; all of it is reported
            name = str(node["_target_"])
            text = f"{name} cannot be imported.{_why_not_found(name, error.__cause__ or error)}"
            faults[f"{key}._target_"] = Fault(f"{shown(config, f'{key}._target_', typed)}: {text}", error)
            continue
        found = {
            f"{key}.{name}": Fault(f"{shown(config, f'{key}.{name}', typed)}: {text}")
            for name, text in _signature(node, target)
        }
        another = _of_another_class(key, node, target, config, typed)
        if another:
            found = {one: fault for one, fault in found.items() if one in typed}
        faults |= another | found
    return faults


def _of_another_class(
    key: str, node: DictConfig, target: Callable[..., Any], config: DictConfig, typed: Mapping[str, str]
) -> dict[str, Fault]:
    """One error for all settings that the option of a group has left to another class that was typed."""
    parameters = _parameters(target)
    choice = OmegaConf.select(config, f"hydra.runtime.choices.{key}")
    line = typed.get(f"{key}._target_")
    if line is None or choice is None or parameters is None or _takes_any(parameters):
        return {}
    names = [name for name in map(str, node) if name not in SPECIAL and f"{key}.{name}" not in typed]
    left = [name for name in names if name not in parameters]
    if not left:
        return {}
    called = getattr(target, "__name__", str(target))
    text = (
        f"{line}: {called} has no setting {', '.join(left)}, which {key}={choice} brings. Add {key}=own, which"
        f" brings none: {key}=own {line}; what {called} takes is then added with +{key}.<setting>=<value>."
    )
    return {f"{key}._target_": Fault(text)}


def _signature(node: DictConfig, target: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with a setting, by its name."""
    parameters = _parameters(target)
    if parameters is None:
        return
    hints = _hints(target)
    called = getattr(target, "__name__", str(target))
    for name in map(str, node):
        if name in SPECIAL:
            continue
        if name not in parameters:
            if not _takes_any(parameters):
                yield name, f"{called} has no setting {name!r}.{did_you_mean(name, parameters)}"
            continue
        try:
            value = node[name]
        except OmegaConfBaseException:
            continue  # missing, or refers to what is not there
        expected = mismatch(value, hints.get(name), default=parameters[name].default)
        if expected is not None:
            near = did_you_mean(value, re.findall("'(.+?)'", expected)) if isinstance(value, str) else ""
            yield name, f"expected {expected}, given {_in_words(value)}.{near}"


@cache
def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None  # written in C without a signature


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


@cache
def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError, AttributeError):
        return {}  # annotations that exist for type checkers only


def _in_words(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"the text {value!r}" if isinstance(value, str) else repr(value)


def _why_not_found(name: str, cause: BaseException) -> str:
    """Why a target cannot be imported, and what may help."""
    module = name.partition(".")[0]
    if not isinstance(cause, ModuleNotFoundError) or cause.name != module:
        return did_you_mean(name.rpartition(".")[2], _names_beside(name)) or f" {first_line(cause)}"
    if module == name:
        return " Expected module.Class."
    here = Path.cwd()
    near = did_you_mean(module, [found.name for found in pkgutil.iter_modules([str(here)])])
    left_out = " (left out for -P or PYTHONSAFEPATH)" if is_left_out() else ""
    return (
        f" There is no module {module!r}, neither in {here}{left_out} nor installed.{near} Start in the folder of"
        f" {module}.py, or name that in PYTHONPATH."
    )


def is_left_out() -> bool:
    """Whether Python is told not to import from the folder where it is started; it heeds that from 3.11."""
    return bool(getattr(sys.flags, "safe_path", False) or os.environ.get("PYTHONSAFEPATH"))


def _names_beside(name: str) -> list[str]:
    """Public names of the module or class that `name` is looked for in."""
    place, _, wrong = name.rpartition(".")
    try:
        owner = locate(place)
        return [other for other in getattr(owner, "__all__", dir(owner)) if other != wrong]
    except Exception:  # the same: there is nothing to compare with
        return []
