"""Values of a configuration compared with the signatures of what they configure."""

from __future__ import annotations

import enum
import inspect
import logging
import os
import pkgutil
import re
import sys
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra.utils
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_lockstep._application.signatures import read_target
from lightning_lockstep._doors.hydra_internals import locate, node_at, plain_value
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import first_line, say
from lightning_lockstep.errors import ConfigurationError
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
    """Print all errors as one message to standard error."""
    if stack_traces:
        for fault in faults:
            if fault.error is not None:
                traceback.print_exception(fault.error)
    say(describe(program, faults, stack_traces=stack_traces, outcome=outcome))


def describe(
    program: str,
    faults: Sequence[Fault],
    *,
    stack_traces: bool = False,
    outcome: str = "nothing was started",
) -> str:
    """Return the message of `show_faults`."""
    count = "one error" if len(faults) == 1 else f"{len(faults)} errors"
    lines = [f"{program}: {count} in the configuration; {outcome}.", ""]
    for number, fault in enumerate(faults, 1):
        first, *rest = fault.text.splitlines() or [""]
        lines += [f"  {number}. {first}", *(f"     {line}" for line in rest)]
    if not stack_traces and any(fault.error is not None for fault in faults):
        lines += ["", "HYDRA_FULL_ERROR=1 shows the exceptions behind this."]
    return "\n".join([*lines, ""])


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


# -- Do the values fit what they are given to? --
# Every node with a `_target_` is compared with the signature of what it names: settings that it does not
# have, values of another type. Classes of this package and of Lightning are made besides, since their
# constructors check what a signature cannot say and have no effect. Not so loggers, which may begin a run,
# and what others wrote, whose effects are unknown: they are made only when the run itself begins.

_SPECIAL = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
_HARMLESS = ("lightning_lockstep.", "lightning.pytorch.", "pytorch_lightning.")


class TargetChecks:
    """Checks of the values of one composed job."""

    def __init__(self, config: DictConfig, typed: dict[str, str]) -> None:
        self.config = config
        self.typed = typed  # overrides by key: an error of that key is reported as typed

    def signature_faults(self) -> list[Fault]:
        """Settings that a target does not have, and values of a type that it does not take."""
        faults: list[Fault] = []
        for key, node in target_nodes(self.config):
            target = read_target(str(node["_target_"])) or self._locate(key, node)
            if isinstance(target, Fault):
                faults.append(target)
            else:
                faults += self._of_another(key, target, self._signature(key, node, target))
        return faults

    def _of_another(self, key: str, target: Callable[..., Any], faults: dict[str, Fault]) -> list[Fault]:
        """The errors of a signature, those of what another target has left behind as one."""
        known = _parameters(target) or {}
        left = [name for name in faults if f"{key}.{name}" not in self.typed and name not in known]
        choice = OmegaConf.select(self.config, f"hydra.runtime.choices.{key}")
        if f"{key}._target_" not in self.typed or not left or choice is None:
            return list(faults.values())
        called = getattr(target, "__name__", str(target))
        line = self.typed[f"{key}._target_"]
        text = (
            f"{line}: {called} has no setting {', '.join(left)}, which {key}={choice} brings. Add {key}=own, which"
            f" brings none: {key}=own {line}; what {called} takes is then added with +{key}.<setting>=<value>."
        )
        return [Fault(text), *(fault for name, fault in faults.items() if name not in left)]

    def missing_faults(self, component: str) -> list[Fault]:
        """Values below `component` that have to be given and were not."""
        node = OmegaConf.select(self.config, component, throw_on_missing=False)
        if not isinstance(node, DictConfig):
            return []
        faults = []
        for key, where, name in entries(node, component):
            if OmegaConf.is_missing(where, name):
                example = "module.Class" if name == "_target_" else "..."
                faults.append(Fault(f"{key} is required: add {key}={example}"))
            elif OmegaConf.is_interpolation(where, name):  # left over when everything else was resolved
                reference = plain_value(node_at(where, name))
                text = f"takes its value from {reference}, and this configuration has no such key."
                faults.append(Fault(f"{key}: {text}"))
        return faults

    # given: arguments in place of those in the configuration
    def constructor_faults(self, component: str, **given: Any) -> list[Fault]:
        """What the constructor of `component` says about its settings, if it has no other effect."""
        node = OmegaConf.select(self.config, component, throw_on_missing=False)
        if not isinstance(node, DictConfig) or "_target_" not in node or self.missing_faults(component):
            return []
        target = self._locate(component, node)
        if isinstance(target, Fault):
            return []  # that of its signature
        from lightning_lockstep._application.records import is_logger, missing_package

        if is_logger(target):
            error = missing_package(target, component, node)
            return [] if error is None else [Fault(str(error), error)]
        if not all(_harmless(target_of(inner)) for _, inner in target_nodes(node)):
            return []
        wrong = self._signature(component, node, target)
        node = _without(node, wrong)
        faults = []
        left_out: list[str] = []
        # A constructor may stop at the first setting that it objects to. The next ones are found without that.
        while said := _try_to_make(node, given):
            if said[0][0].startswith(tuple(left_out)):
                break  # about the default in the place of the setting
            name = _objected(node, given, said[0][0]) if len(said) == 1 else None
            key = component if name is None else f"{component}.{name}"
            faults += [Fault(self._label(component, key, text), error) for text, error in said]
            if name is None:
                break
            left_out.append(name)
            node = _without(node, left_out)
        # What it lacks now it was given.
        return [fault for fault in faults if not (wrong and isinstance(fault.error, TypeError))]

    def _locate(self, key: str, node: DictConfig) -> Callable[..., Any] | Fault:
        name = str(node["_target_"])
        try:
            target: Callable[..., Any] = locate(name)
            return target
        except Exception as error:  # importing a module can raise anything; all of it is reported
            text = f"{name} cannot be imported.{_why_not_found(name, error.__cause__ or error)}"
            return Fault(f"{self.shown(f'{key}._target_')}: {text}", error)

    def _signature(self, key: str, node: DictConfig, target: Callable[..., Any]) -> dict[str, Fault]:
        """What is wrong with a setting, by its name."""
        parameters = _parameters(target)
        if parameters is None:
            return {}
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        hints = _hints(target)
        called = getattr(target, "__name__", str(target))
        faults: dict[str, Fault] = {}
        for name in map(str, node):
            if name in _SPECIAL:
                continue
            if name not in parameters:
                if not open_ended:
                    text = f"{called} has no setting {name!r}.{did_you_mean(name, parameters)}"
                    faults[name] = Fault(f"{self.shown(f'{key}.{name}')}: {text}")
            elif not OmegaConf.is_missing(node, name) and not OmegaConf.is_interpolation(node, name):
                expected = mismatch(node[name], hints.get(name), default=parameters[name].default)
                if expected is not None:
                    text = f"expected {expected}, given {_say(node[name])}."
                    if isinstance(node[name], str):
                        text += did_you_mean(node[name], re.findall("'(.+?)'", expected))
                    faults[name] = Fault(f"{self.shown(f'{key}.{name}')}: {text}")
        return faults

    def shown(self, key: str) -> str:
        """A key as it was typed, or with its value."""
        if key in self.typed:
            return self.typed[key]
        value = OmegaConf.select(self.config, key, throw_on_missing=False)
        return f"{key}={value}" if isinstance(value, (str, int, float, bool)) else key

    def _label(self, component: str, key: str, text: str) -> str:
        """Put the key in front of what a constructor says, in place of the `name=value` it may open with."""
        node = OmegaConf.select(self.config, component)
        text = text.removeprefix(f"{str(node['_target_']).rpartition('.')[2]}: ")
        name = re.split(r"[= ]", text, maxsplit=1)[0]
        if name in node and name not in _SPECIAL:
            return f"{self.shown(f'{component}.{name}')}: {text.removeprefix(f'{name}={node[name]!r}: ')}"
        return f"{self.shown(key)}: {text}"


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


def _harmless(target: Callable[..., Any] | None) -> bool:
    from lightning_lockstep._application.records import is_logger

    return f"{getattr(target, '__module__', '')}.".startswith(_HARMLESS) and not is_logger(target)


def target_of(node: object) -> Callable[..., Any] | None:
    """What the `_target_` of a node names; `None` if it has none or that cannot be imported."""
    if not isinstance(node, DictConfig) or "_target_" not in node:
        return None
    try:
        target: Callable[..., Any] = locate(str(node["_target_"]))
    except Exception:  # importing a module can raise anything; it is reported where the target is checked
        return None
    return target


def settings_of(node: object) -> set[str] | None:
    """Names of all settings that the target of a node has; `None` if it takes any or cannot be asked."""
    name = str(node.get("_target_")) if isinstance(node, DictConfig) else ""
    target = read_target(name) or target_of(node)
    if target is None:
        return None
    parameters = _parameters(target)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return set(parameters)


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None  # written in C without a signature


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


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError, AttributeError):
        return {}  # annotations that exist for type checkers only


def _say(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"the text {value!r}" if isinstance(value, str) else repr(value)


def _try_to_make(node: DictConfig, given: dict[str, Any]) -> list[tuple[str, BaseException]]:
    """Make one component on the meta device and without logs, only for the errors that its constructor raises."""
    import torch

    from lightning_lockstep._doors.lightning import MisconfigurationException

    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            hydra.utils.instantiate(node, _convert_="all", **given)
    except (HydraException, OmegaConfBaseException) as error:
        # Any other error may come from the meta device, and says nothing about the settings.
        if isinstance(
            error.__cause__ or error, (ValueError, TypeError, ImportError, MisconfigurationException)
        ):
            return objections(error)
    finally:
        logging.disable(logging.NOTSET)
    return []


def _objected(node: DictConfig, given: dict[str, Any], text: str) -> str | None:
    """The setting without which a constructor no longer says `text`."""
    for name in [name for name in map(str, node) if name not in _SPECIAL and name not in given]:
        if text not in [said for said, _ in _try_to_make(_without(node, [name]), given)]:
            return name
    return None


def _without(node: DictConfig, names: Iterable[str]) -> DictConfig:
    return OmegaConf.masked_copy(node, [name for name in map(str, node) if name not in names])


def objections(error: BaseException) -> list[tuple[str, BaseException]]:
    """What a failed instantiation says: all errors of a `ConfigurationError`, else its cause's first line."""
    cause: BaseException = error.__cause__ or error
    if isinstance(cause, ConfigurationError):
        return [(text, cause) for text in cause.faults]
    return [(first_line(cause), cause)]
