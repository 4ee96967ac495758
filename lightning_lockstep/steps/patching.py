"""Attributes put in the place of others for a while, and taken away exactly; loaders in the place of others."""

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
    """Calls one function in the place of another; a deep copy or a pickle of the owner has that other one."""

    def __init__(self, function: Callable[..., Any], owner: object, name: str, before: object) -> None:
        former: Any = getattr(owner, name, function) if before is _ABSENT else before
        self.__wrapped__ = unwrap(former)  # Lightning and torch.compile look at the signature of that
        self._function, self._former = function, (owner, name, before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        owner, name, before = self._former
        if before is _ABSENT:
            return getattr, (owner, name)  # where it is made again, it has no attributes yet
        return max, ((before,),)  # the thing itself, by what every Python has


def put_in_place(owner: object, name: str, value: object) -> Callable[[], None]:
    """Set an attribute of ``owner`` itself, past any ``__setattr__`` and property; returns what undoes it."""
    # What was found through the class, such as a method, is found again once the attribute is deleted; deep copies and
    # pickles of a module have it. For a place that runs in every step, where a context manager is too dear; elsewhere
    # use `replaced`.
    attributes = vars(owner)
    before = attributes.get(name, _ABSENT)
    if isinstance(owner, nn.Module) and callable(value):
        value = _InItsPlace(value, owner, name, before)
    attributes[name] = value
    return partial(_put_back, attributes, name, before)


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


#: Lightning lets a loader that has these methods continue a resumed epoch by itself.
STATEFUL = ("state_dict", "load_state_dict")


class LoaderAround:
    """Behaves like the loader that it wraps, except for what a subclass changes."""

    # Attributes under ``own`` are its own, and every other one is the loader's. It has no state, because that of the
    # loader would not count what the subclass does.

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
    """Return a copy of a loader with other attributes; the program may use its own for something else."""
    made = copy.copy(loader)
    # Its ``__setattr__`` refuses some, because it could not check what it gets. The copy starts its own workers.
    vars(made).update(attributes, _iterator=None)
    return made


def batch_size_of(loader: Any) -> int | None:
    """Return the batch size of a loader, if it says one."""
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def length_of(loader: Any) -> int | None:
    """Return how many batches a loader says that it has, if it does."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
