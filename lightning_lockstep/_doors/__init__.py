"""What is left of the private names of other packages; each file goes with the room that uses it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


class Door:
    """Stands for what `deepspeed_*` and `hydra_internals` note of their names; it goes with them."""

    def __init__(self, package: str, names: Mapping[str, str] | None = None) -> None:
        self.package, self.names = package, dict(names or {})

    def find(self, path: str) -> Any:
        """Return what ``path`` names."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:length]))
            except ModuleNotFoundError:
                continue
            return functools.reduce(getattr, parts[length:], found)
        raise ModuleNotFoundError(f"no module {parts[0]}", name=parts[0])

    def touches(self, *paths: str, why: str) -> Callable[[_T], _T]:
        """Return a decorator that does nothing."""
        return lambda function: function

    def adapts(self, owner: str, /, **names: str) -> Callable[[_T], _T]:
        """Return a decorator that does nothing."""
        return lambda adapter: adapter
