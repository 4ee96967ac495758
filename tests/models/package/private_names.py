"""The private names of other packages that this one uses, as the lists of `tests/unit/package` have them."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from lightning_lockstep import _lightning as lightning

LISTS = Path(__file__).parents[2] / "unit" / "package" / "private_names"
# Lightning is published twice.
TWINS = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


def names() -> set[str]:
    """All names of the lists, and those of Lightning that the package imports; of Lightning in both packages."""
    lines = [line for file in LISTS.glob("*.txt") for line in file.read_text().splitlines()]
    found = {line for line in lines if line and not line.startswith("#")}
    found |= {f"lightning.{path}" for path in lightning.NAMES.values()}
    for family, twin in TWINS.items():
        found |= {name.replace(family, twin, 1) for name in found if name.startswith(f"{family}.")}
    return found


def is_there(path: str) -> bool:
    """Whether the installed release has a name, be it one that only objects of a class have."""
    owner, _, name = path.rpartition(".")
    try:
        look_up(path)
    except ImportError:
        return False
    except AttributeError:
        try:
            return sets_on_itself(look_up(owner), name)
        except (ImportError, AttributeError):
            return False
    return True


def look_up(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        owner, _, name = path.rpartition(".")
        if not owner:
            raise
        return getattr(look_up(owner), name)


def sets_on_itself(holder: Any, name: str) -> bool:
    """Whether a class has the attribute among its annotations or slots or sets it on `self`, a function on anything."""
    for one in getattr(holder, "__mro__", [holder]):
        if name in getattr(one, "__annotations__", {}) or name in getattr(one, "__slots__", ()):
            return True
        try:
            source = inspect.getsource(one)
        except (OSError, TypeError):  # a class of C++
            continue
        if re.search(rf"{r'self' if inspect.isclass(one) else ''}\.{name}\b[^=\n]*=(?!=)", source):
            return True
    return False
