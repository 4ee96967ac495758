"""How a collective reduces, read inside a kernel of torch's dispatcher.

Newer torch can be asked. Torch 2.9 hands its kernels a ``ReduceOp`` that Python cannot read. There the kind is noted
one call earlier: where Python calls a process group, and where a functional collective enters the dispatcher. What is
left is called by DDP's reducer and its communication hooks in C++, which sum.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_lockstep._doors.torch_internals import (
    FUNCTIONAL_NAMESPACE,
    FUNCTIONAL_REDUCTIONS,
    REDUCE_SCATTER_METHOD,
    custom_class_schemas,
    destroy_library,
    functional_operator,
    keys_after,
    schema_of,
)

__all__ = ["noting_reductions", "reduction_kind"]

_Kind: Any = dist.ReduceOp.RedOpType
_READABLE: tuple[Any, ...] = (_Kind, dist.ReduceOp)

_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    REDUCE_SCATTER_METHOD,
    "reduce_scatter_tensor_coalesced",
)
_KEY = "BackendSelect"  # the last one before those of the backends
_lock = threading.Lock()
_open = 0  # how many contexts have the kind noted
_places = ExitStack()  # what was put in place for it
_noted = threading.local()


def reduction_kind(given: Any) -> str:
    """Return how a collective reduces, such as ``sum``; in a kernel of torch 2.9 if that was noted."""
    if isinstance(given, _READABLE):
        return _name(given)
    if _can_be_read():
        return _name(_Kind(given.op()))
    return getattr(_noted, "kind", "sum")


def _name(given: Any) -> str:
    kind = given if isinstance(given, _Kind) else _Kind(given.op)
    return str(kind.name).lower()


@contextmanager
def noting_reductions() -> Iterator[None]:
    """Have :func:`reduction_kind` know the kinds of what Python calls; nothing is done where torch can be asked.

    Enter and leave it while no collective is being called.
    """
    if _can_be_read():
        yield
        return
    _count(1)
    try:
        yield
    finally:
        _count(-1)


@functools.cache
def _can_be_read() -> bool:
    return any(schema.name == "op" and "c10d.ReduceOp" in str(schema) for schema in custom_class_schemas())


def _count(change: int) -> None:
    global _open
    with _lock:
        before, _open = _open, _open + change
        if not before:
            for name in _METHODS:
                method = getattr(dist.ProcessGroup, name)
                _places.callback(setattr, dist.ProcessGroup, name, method)
                setattr(dist.ProcessGroup, name, _noting_method(method))
            library = torch.library.Library(FUNCTIONAL_NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
            _places.callback(destroy_library, library)
            for name in FUNCTIONAL_REDUCTIONS:
                library.impl(name, _noting_kernel(name), _KEY, with_keyset=True)  # type: ignore[no-untyped-call]
        elif not _open:
            _places.close()


def _noting_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(*args: Any, **kwargs: Any) -> Any:
        with _note(_kind_among((*args[1:], *kwargs.values()))):
            return method(*args, **kwargs)

    return noting


def _noting_kernel(name: str) -> Callable[..., Any]:
    overload = functional_operator(name)
    position = [argument.name for argument in schema_of(overload).arguments].index("reduce_op")
    after = keys_after(_KEY)

    def kernel(keyset: Any, *args: Any) -> Any:
        with _note(args[position]):
            return overload.redispatch(keyset & after, *args)

    return kernel


@contextmanager
def _note(kind: str) -> Iterator[None]:
    before = getattr(_noted, "kind", "sum")
    _noted.kind = kind
    try:
        yield
    finally:
        _noted.kind = before


def _kind_among(args: tuple[Any, ...]) -> str:
    """Return the kind that the arguments of a process group's method ask for; a sum where they name none."""
    for given in args:
        asked = getattr(given, "reduceOp", given)
        if isinstance(asked, _READABLE):
            return _name(asked)
    return "sum"
