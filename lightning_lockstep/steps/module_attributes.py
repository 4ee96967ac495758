"""Plain attributes of a module that a training step may change, put back in the objects that held them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lockstep._doors.torch_internals import BUFFERS, MODULES, PARAMETERS

__all__ = ["ModuleAttributes"]


class ModuleAttributes:
    """Plain attributes of a module and its submodules: modes, counters, lists, states of torchmetrics.

    Containers and tensors are put back in place, where others may hold them.
    """

    # Parameters are never exchanged, buffers' values are a matter of their own, and the rest is Lightning's.
    _OTHERS = frozenset({PARAMETERS, MODULES, "_trainer", "_fabric", "trainer"})

    def __init__(self, module: nn.Module) -> None:
        # An engine that divides them keeps them in containers too, and they may be whole or in parts by then.
        self._parameters = {id(parameter) for parameter in module.parameters()}
        self._kept = [
            (m, {name: self._kept_value(name, v) for name, v in vars(m).items() if name not in self._OTHERS})
            for m in module.modules()
        ]

    def _kept_value(self, name: str, value: Any) -> Callable[[], Any]:
        if name == BUFFERS:
            return partial(_refill, value, dict(value), {})
        return _kept(value, set(self._parameters))

    def restore(self) -> None:
        for module, kept in self._kept:
            attributes = vars(module)
            for name in [name for name in attributes if name not in kept and name not in self._OTHERS]:
                del attributes[name]
            for name, put_back in kept.items():
                attributes[name] = put_back()


def _kept(value: Any, seen: set[int]) -> Callable[[], Any]:
    """Return a function that gives the very same object back, with what is in it now."""
    if not isinstance(value, (Tensor, list, set, dict)) or id(value) in seen:
        return partial(_same, value)
    if isinstance(value, Tensor):
        return partial(_with_values, value, value.detach().cpu().clone())
    seen.add(id(value))
    items = dict(value) if isinstance(value, dict) else list(value)
    numbered = items.items() if isinstance(items, dict) else enumerate(items)
    inner = {k: _kept(item, seen) for k, item in numbered if isinstance(item, (Tensor, list, set, dict))}
    return partial(_refill, value, items, inner)


def _same(value: Any) -> Any:
    return value


def _with_values(tensor: Tensor, values: Tensor) -> Tensor:
    if tensor.is_inference():
        return values.to(tensor.device)
    # Writing raises the version, which a graph that is still to be run backward would take for a change.
    if not torch.equal(tensor.detach().cpu(), values):
        with torch.no_grad():
            tensor.copy_(values)
    return tensor


def _refill(container: Any, items: Any, inner: dict[Any, Callable[[], Any]]) -> Any:
    for key, put_back in inner.items():
        items[key] = put_back()
    container.clear()
    container.extend(items) if isinstance(container, list) else container.update(items)
    return container
