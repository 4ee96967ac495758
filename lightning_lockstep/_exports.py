"""A public name stands in the stub of its package, ``__init__.pyi``; the package loads it when it is first used.

What a stub names is public, and so is what a room's `__init__` imports. Everything else is private.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package for the names that its stub imports."""
    # Scientific Python's `lazy_loader` has the same function. It reads neither `import *` nor absolute paths, so that
    # two stubs would list all callbacks and errors, and where EAGER_IMPORT is set it loads torch, which the doctor's
    # processes must do without.
    modules: dict[str, str] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_bytes()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names = import_module(node.module).__all__ if alias.name == "*" else [alias.name]
                modules |= dict.fromkeys(names, node.module)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *modules}), sorted(modules)


def public(name: str) -> Any:
    """Return what the package exports as ``name``, for a room below the one that defines it."""
    return getattr(sys.modules["lightning_lockstep"], name)
