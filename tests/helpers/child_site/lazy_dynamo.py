"""Stands for ``torch._dynamo`` until somebody compiles something; then the real one takes its place.

Its import is a third of the CPU time of ``import lightning``, which wants one class of it for ``isinstance``; every
optimizer step wants ``graph_break`` and ``disable``, which do nothing where nothing is compiled. Any other name
(``torch.compile`` asks for one) brings the real package, and what was handed out before works with it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class _NamedLikeIt(type):
    """An object of torch's own class is one of this class too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return any(
            c.__name__ == cls.__name__ and c.__module__.startswith(NAME) for c in type(instance).__mro__
        )


class OptimizedModule(metaclass=_NamedLikeIt):
    """What ``isinstance`` is asked about."""


def graph_break(msg: str = "") -> None:
    """Nothing is compiled, so there is no graph to end."""


def disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Nothing is compiled, so the function is as it should be."""
    return fn if fn is not None else disable


class _OptimizeDDP:
    @staticmethod
    def get_optimize_ddp_mode() -> str:
        """DDP asks when it is constructed; this is torch's default."""
        return "ddp_optimizer"


class _TraceRules:
    @staticmethod
    def clear_lru_cache() -> None:
        """``torch.distributed`` asks when a process group comes or goes."""


class LazyDynamo(ModuleType):
    """The few names that are asked for in every run; for all others, the real package."""

    def __init__(self) -> None:
        super().__init__(NAME)
        vars(self).update(
            OptimizedModule=OptimizedModule,
            graph_break=graph_break,
            disable=disable,
            utils=_OptimizeDDP,
            trace_rules=_TraceRules,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system's own
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self) -> ModuleType:
        """Import the real package, once; from then on this object has its names."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME], sys.modules["torch"]._dynamo
            real = importlib.import_module(NAME)
            vars(self).update({name: value for name, value in vars(real).items() if name != "__getattr__"})
        return sys.modules[NAME]


class _Loader:
    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, getattr(module, "__spec__", None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec or module.__spec__


_lazy = LazyDynamo()
_pending = True


def spec_of(fullname: str) -> ModuleSpec | None:
    """Return what to give for the package or a module of it; ``None`` where the ordinary way is right."""
    global _pending
    if fullname == NAME and _pending:
        _pending = False
        return ModuleSpec(NAME, _Loader(_lazy), is_package=True)  # type: ignore[arg-type]
    if fullname.startswith(f"{NAME}.") and sys.modules.get(NAME) is _lazy:
        _lazy.real()
        if fullname in sys.modules:  # importing the package has brought it
            return ModuleSpec(fullname, _Loader(sys.modules[fullname]))  # type: ignore[arg-type]
        return PathFinder.find_spec(fullname, sys.modules[NAME].__path__)  # that of its parent is empty
    return None
