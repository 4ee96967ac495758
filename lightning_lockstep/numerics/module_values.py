"""Names of modules, and of the values in their inputs and outputs.

Containers are walked here and not by ``tree_flatten_with_path`` or ``apply_to_collection``: the former takes
dataclasses and mappings of other classes (as Transformers' outputs are) for leaves unless they are registered,
the latter hands out no names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from lightning_lockstep._doors.torch_internals import WRAPPED_MODULES

__all__ = ["NamePatterns", "call_values", "module_name", "module_names", "output_values", "parent_name"]

# Containers nested deeper are not looked into, which also ends cycles.
_DEPTH = 5


class NamePatterns:
    """Shell-style patterns for names such as ``decoder.block.0.output['mask']``.

    A pattern matches a name as printed, or with its indices written with dots (``decoder.block.0.output.mask``).
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self.patterns = tuple(patterns)
        self._known: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def match(self, name: str) -> bool:
        """Return whether any pattern matches the name."""
        if not self.patterns:
            return False
        if name not in self._known:
            dotted = name.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
            self._known[name] = any(fnmatchcase(name, p) or fnmatchcase(dotted, p) for p in self.patterns)
        return self._known[name]


def module_names(root: nn.Module) -> dict[nn.Module, str]:
    """Return the name of ``root`` and of every module below it, as :func:`module_name` gives it."""
    return {module: module_name(name) for name, module in root.named_modules()}


def module_name(name: str) -> str:
    """Return a module's name without the wrappers that ``torch.compile`` and checkpointing put in."""
    return ".".join(p for p in name.split(".") if p not in WRAPPED_MODULES)


def parent_name(name: str) -> str:
    """Return the name of the module that contains the one named; the root's name is empty."""
    return name.rpartition(".")[0]


def call_values(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (label, value) for all that a module was called with: ``input[i]``, ``input['name']``."""
    for index, value in enumerate(args if isinstance(args, tuple) else (args,)):
        yield from _walk(f"input[{index}]", value, _DEPTH)
    for name, value in kwargs.items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            yield from _walk(f"input[{name!r}]", value, _DEPTH)


def output_values(output: Any, label: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield (label, value) for all that a module returned: ``output``, ``output[i][j]``, ``output['name']``."""
    yield from _walk(label, output, _DEPTH)


def _walk(label: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    children = _children(value) if depth else None
    if children is None:
        yield label, value
        return
    for key, child in children:
        yield from _walk(f"{label}[{key!r}]", child, depth - 1)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, (Tensor, str, bytes)) or value is None:
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None
