"""Attributes replaced for a while and restored exactly; loaders that stand for others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

_ABSENT = object()


class _InItsPlace:
    """Calls one function in place of another; a deep copy or a pickle of the owner has the original."""

    def __init__(self, function: Callable[..., Any], owner: object, name: str, before: object) -> None:
        former: Any = getattr(owner, name, function) if before is _ABSENT else before
        self.__wrapped__ = unwrap(former)  # whose signature Lightning and torch.compile use
        self._function, self._former = function, (owner, name, before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        owner, name, before = self._former
        if before is _ABSENT:
            return getattr, (owner, name)  # a copied owner has no attributes yet, so this is the class's
        return max, ((before,),)  # `before` itself: of one element, max gives that element


def put_in_place(owner: object, name: str, value: object) -> Callable[[], None]:
    """Set an attribute in ``vars(owner)``, without ``__setattr__`` or properties; return what undoes it."""
    # If the attribute was found through the class, as a method is, undoing deletes it here, and the class's is found
    # again; deep copies and pickles of a module have that one too. This is for code that runs in every step, where a
    # context manager costs too much; elsewhere use `replaced`.
    attributes = vars(owner)
    before = attributes.get(name, _ABSENT)
    if isinstance(owner, nn.Module) and callable(value):
        value = _InItsPlace(value, owner, name, before)
    attributes[name] = value
    return partial(_put_back, attributes, name, before)


def call_around(owner: object, **functions: Callable[..., Any]) -> None:
    """Have functions called in place of the owner's of the same name, which they are given first."""
    for name, function in functions.items():
        put_in_place(owner, name, partial(function, getattr(owner, name)))


def _put_back(attributes: dict[str, Any], name: str, before: object) -> None:
    if before is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = before


@contextmanager
def replaced(owner: object, /, **values: object) -> Iterator[None]:
    """Give ``owner`` these attributes while the body runs; see :func:`put_in_place`."""
    undo = [put_in_place(owner, name, value) for name, value in values.items()]
    try:
        yield
    finally:
        for put_back in reversed(undo):
            put_back()


@contextmanager
def assigned(owner: Any, /, **values: object) -> Iterator[None]:
    """Assign these attributes of ``owner``, properties too, while the body runs."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for a function; unlike a lambda it can be pickled, with what has it."""


#: Lightning lets a loader that has these methods continue a resumed epoch by itself.
STATEFUL = ("state_dict", "load_state_dict")


class LoaderAround:
    """Behaves like the loader that it wraps, except for what a subclass changes."""

    # The attributes in ``own`` are its own, and all others are those of the loader. It has no state, because the
    # loader's state would not include what the subclass does.

    def __init__(self, loader: Any, **own: Any) -> None:
        vars(self).update(own, _loader=loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", *STATEFUL) or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._loader, name, value)


def loader_with(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other attributes; the program may use its own loader elsewhere."""
    made = copy.copy(loader)
    # DataLoader's ``__setattr__`` refuses some of them. Without an iterator, the copy starts its own workers.
    vars(made).update(attributes, _iterator=None)
    return made


def batch_size_of(loader: Any) -> int | None:
    """Return the batch size of a loader, or None if it has none."""
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None
