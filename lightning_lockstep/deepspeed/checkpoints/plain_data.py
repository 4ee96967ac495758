"""What a file of DeepSpeed holds, read as plain data.

DeepSpeed writes pickles that name its own classes, and those of whatever the run had in its state. They are read
here without any of these classes: what is not plain data becomes an :class:`Inert` object, which holds what it was
made from and can do nothing. So DeepSpeed need not be installed, and a file that is not trusted runs no code. (A class
that this process has declared safe by ``torch.serialization.add_safe_globals`` stays what it is.)
"""

from __future__ import annotations

import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from lightning_lockstep.errors import ConfigurationError

__all__ = ["Inert", "is_plain", "plain_entries", "read_file"]

_RUNS_PROGRAMS = ("os", "posix", "nt", "sys")  # modules that torch refuses even where they are declared safe
_CONTAINERS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set, torch.Size)
_SCALARS = (
    *(str, int, float, bool, complex, bytes, bytearray, type(None)),
    *(torch.Tensor, torch.nn.Parameter, torch.device, torch.dtype),
)
#: What a damaged or foreign file makes of the unpickler.
_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
    *(pickle.UnpicklingError, struct.error),
)


class Inert:
    """An object of a class that is not plain data, as a file describes it; it runs nothing."""

    origin = "?"
    arguments: tuple[Any, ...]  # what the object was to be made with
    state: Any  # what was to be put into it, or None

    def __new__(cls, *arguments: Any) -> Inert:
        """Keep the arguments; what an unpickler makes may never see ``__init__``."""
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<inert {self.origin}>"


class _PlainDict:
    """Stands for a subclass of ``dict``: only a plain dictionary gets items from the unpickler."""

    def __new__(cls, *arguments: Any) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


class _PlainList:
    """Stands for a subclass of ``list``."""

    def __new__(cls, *arguments: Any) -> list[Any]:  # type: ignore[misc]
        return []


class _PlainPath:
    """Stands for the paths of ``pathlib``, which come through as strings."""

    def __new__(cls, *parts: Any) -> str:  # type: ignore[misc]
        return str(PurePosixPath(*map(str, parts)))


def read_file(path: Path) -> dict[str, Any]:
    """Return what ``torch.save`` has written into a file, tensors memory-mapped and other objects inert."""
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        dangerous = sorted(name for name in foreign if name.partition(".")[0] in _RUNS_PROGRAMS)
        content = {} if dangerous else _load(path, foreign)
    except _UNREADABLE as error:
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0].strip()
        raise ConfigurationError(
            f"{path}: cannot be read ({reason or type(error).__name__}). Expected a file of DeepSpeed, in full: it may"
            " have been cut off, by a full disk or while it was copied."
        ) from error
    if dangerous:
        raise ConfigurationError(
            f"{path}: names {', '.join(dangerous)}, which could run code when the file is loaded; none of it was"
            " run. DeepSpeed writes nothing like that: find out where this file comes from."
        )
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: expected a dictionary, found {type(content).__name__}.")
    return content


def plain_entries(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that are plain data, and the names of those that had to be left out.

    An entry is a value, or in a dictionary one of its values: half of a callback's state would be worse than none.
    """
    kept: dict[str, Any] = {}
    dropped = []
    for key, value in values.items():
        if is_plain(value):
            kept[key] = value
        elif type(value) in _CONTAINERS:
            kept[key] = {k: v for k, v in value.items() if is_plain(k) and is_plain(v)}
            dropped += [f"{key}.{k}" for k in value if k not in kept[key]]
        else:
            dropped.append(str(key))
    return kept, dropped


def is_plain(value: object) -> bool:
    """Return whether a value is made of numbers, text, tensors and containers alone."""
    kind = type(value)
    if kind in _CONTAINERS:
        parts = [*value.items(), *getattr(value, "__dict__", {}).items()]  # type: ignore[attr-defined]
        return all(is_plain(key) and is_plain(part) for key, part in parts)
    if kind in _SEQUENCES:
        return all(map(is_plain, value))  # type: ignore[call-overload]
    return kind in _SCALARS


def _load(path: Path, foreign: Iterable[str]) -> Any:
    stands_for = {name: _stand_in(name) for name in foreign}
    while True:
        pairs: list[Any] = [(stand_in, name) for name, stand_in in stands_for.items()]
        try:
            with torch.serialization.safe_globals(pairs):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            # A subclass of dict or list shows itself when it is to get items.
            name = next((name for name, kind in stands_for.items() if repr(kind) in str(error)), None)
            if name is None or not issubclass(stands_for[name], Inert):
                raise
            stands_for[name] = _PlainDict if "SETITEM" in str(error) else _PlainList


def _stand_in(name: str) -> type:
    if name == "collections.defaultdict":
        return _PlainDict
    if name.startswith("pathlib.") and name.endswith("Path"):
        return _PlainPath
    return type(f"Inert[{name}]", (Inert,), {"origin": name})
