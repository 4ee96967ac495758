"""A key that DeepSpeed does not know is a fault, with the nearest right ones.

DeepSpeed itself ignores such a key in most sections, and refuses it on every rank in the others. The tables are those
of one release; where another is installed, a key that only its sources have is right too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from lightning_lockstep._settings import Faults, did_you_mean
from lightning_lockstep.deepspeed.configuration.key_tables import (
    KNOWN,
    OPTIMIZER_PARAMS,
    OPTIMIZER_TYPES,
    RELEASE,
    REMOVED,
    SAME,
    SCHEDULER_PARAMS,
    TORCH_ADAM_PARAMS,
    Keys,
)

__all__ = ["check_keys", "is_comment"]


def check_keys(config: Mapping[str, Any], faults: Faults) -> None:
    """Add a fault for each key that DeepSpeed does not know, at every level, with the nearest right ones.

    Keys that begin with an underscore are comments. Parameters of optimizers and schedulers that are not DeepSpeed's
    own, and the other places where names are chosen freely, are not looked at.
    """
    _check_section(config, KNOWN, "", faults)
    _check_one_spelling(config, faults)
    _check_optimizer(config, faults)
    _check_scheduler(config, faults)


def is_comment(key: object) -> bool:
    """Return whether a key is there for readers only: it begins with an underscore."""
    return isinstance(key, str) and key.startswith("_")


def _check_section(given: Mapping[str, Any], known: Keys, path: str, faults: Faults) -> None:
    for key, value in given.items():
        here = f"{path}{key}"
        if here in REMOVED and not _is_of_another_release(str(key), only_older=True):
            faults.add(f"{here}: DeepSpeed has removed this key. {REMOVED[here]} Remove it.")
        elif not isinstance(key, str) or (key not in known and not is_comment(key)):
            if not _is_of_another_release(str(key)):
                faults.add(f"{here}: DeepSpeed has no such key{_in(path)}.{_advice(str(key), known, path)}")
        elif known.get(key) is not None:
            if isinstance(value, Mapping):
                _check_section(value, known[key], f"{here}.", faults)
            elif not _may_be_plain(here, value):
                faults.check(False, here, value, f"a section with keys such as {_some_of(known[key])}")


def _check_one_spelling(config: Mapping[str, Any], faults: Faults) -> None:
    for path, pairs in SAME.items():
        inner = config.get(path)
        if not isinstance(inner, Mapping):
            continue
        for name, other in pairs:
            if name in inner and other in inner:
                faults.add(
                    f"{path}.{name}={inner[name]!r} and {path}.{other}={inner[other]!r}: expected one of the two, which"
                    " are the same key."
                )


def _check_optimizer(config: Mapping[str, Any], faults: Faults) -> None:
    name, params = _type_and_params(config, "optimizer")
    if name is None:
        return
    kind = name.lower()
    if kind not in OPTIMIZER_PARAMS:
        import torch.optim

        # DeepSpeed looks every other name up there.
        if not hasattr(torch.optim, name) and not _is_of_another_release(kind):
            near = did_you_mean(name, [*OPTIMIZER_TYPES, *torch.optim.__all__])
            expected = f"one of {', '.join(OPTIMIZER_TYPES)}, or a class of torch.optim"
            faults.add(f"optimizer.type={name!r}: expected {expected}.{near}")
        return
    known = OPTIMIZER_PARAMS[kind]
    if kind in ("adam", "adamw") and params.get("torch_adam") is True:
        known = TORCH_ADAM_PARAMS
    if known is not None:
        _check_params("optimizer", name, params, known, faults)


def _check_scheduler(config: Mapping[str, Any], faults: Faults) -> None:
    name, params = _type_and_params(config, "scheduler")
    if name is None:
        return
    if name in SCHEDULER_PARAMS:
        _check_params("scheduler", name, params, SCHEDULER_PARAMS[name], faults)
        return
    from torch.optim import lr_scheduler

    if not hasattr(lr_scheduler, name):
        near = did_you_mean(name, [*SCHEDULER_PARAMS, *lr_scheduler.__all__])
        expected = f"one of {', '.join(SCHEDULER_PARAMS)}, or a class of torch.optim.lr_scheduler"
        faults.add(f"scheduler.type={name!r}: expected {expected}.{near}")


def _type_and_params(config: Mapping[str, Any], section: str) -> tuple[str | None, Mapping[str, Any]]:
    given = config.get(section)
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        return None, {}
    params = given.get("params")
    return given["type"], params if isinstance(params, Mapping) else {}


def _check_params(
    section: str, name: str, params: Mapping[str, Any], known: frozenset[str], faults: Faults
) -> None:
    for key in params:
        path = f"{section}.params.{key}"
        if key == "max_grad_norm" and section == "optimizer":
            faults.add(
                f"{path}={params[key]!r}: DeepSpeed does not clip gradients in the optimizer. Write"
                " gradient_clipping at the top of the config, or give the Trainer gradient_clip_val."
            )
        elif key not in known and not is_comment(key):
            advice = did_you_mean(str(key), known) or f" It takes {', '.join(sorted(known))}."
            faults.add(f"{path}: DeepSpeed's {name} has no such parameter.{advice}")


def _advice(key: str, known: Keys, path: str) -> str:
    """Return the nearest keys: of this section, else of all others, as a key is often put one level too high."""
    near = did_you_mean(key, known)
    if near:
        return near
    elsewhere = [
        place for place in _paths(KNOWN) if place.rpartition(".")[2] == key and place != f"{path}{key}"
    ]
    if elsewhere:
        return f" Did you mean {' or '.join(map(repr, elsewhere[:2]))}?"
    return f" It takes {', '.join(sorted(known))}." if path else ""


def _paths(known: Keys, path: str = "") -> Iterator[str]:
    for key, inner in known.items():
        yield f"{path}{key}"
        if inner is not None:
            yield from _paths(inner, f"{path}{key}.")


def _is_of_another_release(key: str, *, only_older: bool = False) -> bool:
    """Return whether the installed DeepSpeed is of another release than the tables, and has a key that they lack."""
    installed = _installed()
    if installed is None or installed == Version(RELEASE) or (only_older and installed > Version(RELEASE)):
        return False
    if any(place.rpartition(".")[2] == key for place in _paths(KNOWN)):
        return False  # it is a key of another section
    return re.search(rf"\b{re.escape(key)}\b", _sources_of_installed()) is not None


def _installed() -> Version | None:
    try:
        return Version(importlib.metadata.version("deepspeed"))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None


@cache
def _sources_of_installed() -> str:
    """Return the files in which DeepSpeed names the keys of its config; nothing is imported."""
    spec = importlib.util.find_spec("deepspeed")
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    files = [
        path
        for folder in folders
        for name in ("*config*.py", "constants.py")
        for path in Path(folder).rglob(name)
    ]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def _in(path: str) -> str:
    return f" in {path.rstrip('.')}" if path else ""


def _some_of(known: Keys) -> str:
    return ", ".join(sorted(known)[:3])


def _may_be_plain(path: str, value: object) -> bool:
    # No section at all; the former form of ZeRO, which is on or off; and flags that DeepSpeed reads as off.
    return value is None or (path == "zero_optimization" and isinstance(value, bool))
