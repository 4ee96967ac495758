"""torch's classes of data loaders, as they are without what Lightning puts around them for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

__all__ = ["restore_data_classes"]


def restore_data_classes() -> None:
    """Undo what Lightning does to ``DataLoader`` and ``BatchSampler`` while it asks a program for its loaders.

    Lightning notes how loaders are made by replacing ``__init__``, ``__setattr__`` and ``__delattr__`` of both
    classes, and of all made from them, and leaves that in place when the program's hook raises: the next run
    in the process then refuses ``predict`` with ``DataLoader(dataset, 4)``.

    Source: ``lightning.fabric.utilities.data._replace_dunder_methods``.
    """
    for base in (DataLoader, BatchSampler):
        for cls in (base, *_subclasses(base)):
            for name in ("__init__", "__setattr__", "__delattr__"):
                method = vars(cls).get(name)
                if (own := _without_notes(method)) is not method:
                    setattr(cls, name, own)
                if f"__old{name}" in vars(cls):
                    delattr(cls, f"__old{name}")


def _subclasses(cls: type) -> Iterator[type]:
    below: list[type] = cls.__subclasses__()
    for one in below:
        yield one
        yield from _subclasses(one)


def _without_notes(method: Any) -> Any:
    """Return the class's own method; of two runs that failed, each has put a layer of its own around it."""
    while getattr(method, "__globals__", {}).get("__name__", "").endswith("fabric.utilities.data"):
        method = method.__wrapped__
    return method
