"""A forward hook on every module of a model, which does nothing outside of training steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_lockstep.numerics.module_values import NamePatterns, module_names

__all__ = ["ModuleHooks"]


class ModuleHooks(ABC):
    """Puts a hook on each module; a class that inherits calls this constructor last: it asks for hooks."""

    def __init__(self, root: nn.Module, modules: NamePatterns | None) -> None:
        self.active = False  # whether outputs are looked at now
        self._handles = [
            module.register_forward_hook(self._hook(name))
            for module, name in module_names(root).items()
            if modules is None or modules.match(name)
        ]

    @abstractmethod
    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return the hook of a module."""

    def begin_step(self) -> None:
        """Forget the last step and watch from here on."""
        self.active = True

    def remove(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.active = False
