"""Attributes of an object put in the place of others for a while, and taken away exactly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

_ABSENT = object()


def in_the_name_of(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function that is put around a module's hook the name and the signature of what was there first."""
    # Lightning and torch.compile look at that signature, Lightning behind one ``__wrapped__`` only.
    update_wrapper(function, original).__wrapped__ = inspect.unwrap(original)
    return function


def put_in_place(owner: object, name: str, value: object) -> Callable[[], None]:
    """Give ``owner`` an attribute of its own, past any ``__setattr__`` and property; returns what undoes it.

    What was found through the class, such as a method, is found again once the attribute is deleted. For a
    place that runs in every step, where a context manager is too dear; elsewhere use :func:`replaced`.
    """
    attributes = vars(owner)
    before = attributes.get(name, _ABSENT)
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
