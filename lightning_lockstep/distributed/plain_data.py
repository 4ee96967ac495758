"""Files that torch has saved, read as plain data: an object of a class stays a description of it, which runs nothing.

What is plain data in another form becomes plain: containers of OmegaConf, paths, subclasses of dict and list. Arrays
and numbers of numpy stay what they are, and so do objects of a class that this process has declared safe by
``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy
import torch

from lightning_lockstep._text import listed
from lightning_lockstep.errors import ConfigurationError

# Torch refuses these modules even if they are declared safe, and advises to load the file without its check.
_RUNS_PROGRAMS = ("os", "posix", "nt", "sys")
_CONTAINERS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set, torch.Size)
_SCALARS = (
    *(str, int, float, bool, complex, bytes, bytearray, type(None)),
    *(torch.Tensor, torch.nn.Parameter, torch.device, torch.dtype),
)
_OF_NUMPY = {
    **{f"numpy.{core}.multiarray._reconstruct": numpy.empty(0).__reduce__()[0] for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": numpy.float64(0).__reduce__()[0] for core in ("core", "_core")},
    "numpy.ndarray": numpy.ndarray,
    "numpy.dtype": numpy.dtype,
}
_DTYPES_OF_NUMPY = {type(numpy.dtype(code)) for code in numpy.typecodes["All"]}
#: What a damaged or foreign file makes of the unpickler.
UNREADABLE = (
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


def _stands_for(make: Callable[..., Any]) -> Any:
    """Return a class whose objects are what ``make`` returns: the unpickler makes objects of classes alone."""
    return type("Plain", (), {"__new__": lambda cls, *arguments: make(*arguments)})


# Only plain dictionaries and lists get items from the unpickler.
_PLAIN_DICT = _stands_for(lambda *arguments: OrderedDict())
_PLAIN_LIST = _stands_for(lambda *arguments: [])
_PATH_TEXT = _stands_for(lambda *parts: str(PurePosixPath(*map(str, parts))))


def read_plain(file: Path | IO[bytes]) -> Any:
    """Return what ``torch.save`` has written, other objects inert; of a path, tensors memory-mapped."""
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    dangerous = sorted(name for name in foreign if name.partition(".")[0] in _RUNS_PROGRAMS)
    if dangerous:
        raise ConfigurationError(
            f"{file}: names {', '.join(dangerous)}, which could run code when the file is loaded; none of it was"
            " run. No checkpoint needs anything like that: find out where this file comes from."
        )
    return _without_omegaconf(_load(file, foreign))


def _load(file: Path | IO[bytes], foreign: Iterable[str]) -> Any:
    stands_for = {name: _stand_in(name) for name in foreign}
    while True:
        pairs: list[Any] = [(stand_in, name) for name, stand_in in stands_for.items()]
        try:
            with torch.serialization.safe_globals([*pairs, *_DTYPES_OF_NUMPY]):
                if not isinstance(file, Path):
                    file.seek(0)
                return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))
        except pickle.UnpicklingError as error:
            # Torch names the stand-in of a subclass of dict or list when that is to get items.
            name = next((name for name, kind in stands_for.items() if repr(kind) in str(error)), None)
            if name is None or not _is_inert(stands_for[name]):
                raise
            stands_for[name] = _PLAIN_DICT if "SETITEM" in str(error) else _PLAIN_LIST


def _stand_in(name: str) -> Any:
    if name in _OF_NUMPY:
        return _OF_NUMPY[name]
    if name == "collections.defaultdict":
        return _PLAIN_DICT
    if name.startswith("pathlib.") and name.endswith("Path"):
        return _PATH_TEXT
    return type(f"Inert[{name}]", (Inert,), {"origin": name})


def _is_inert(value: object) -> bool:
    """Return whether a value is an object of a class that was not made, or such a class."""
    return isinstance(value, Inert) or (isinstance(value, type) and issubclass(value, Inert))


def _without_omegaconf(value: Any) -> Any:
    """Return nested containers with plain ones for those of OmegaConf; interpolations stay text."""
    if type(value) in (dict, list):
        parts = value.items() if type(value) is dict else enumerate(value)
        for key, part in list(parts):
            value[key] = _without_omegaconf(part)
    elif type(value) is tuple:
        return tuple(map(_without_omegaconf, value))
    elif isinstance(value, Inert) and value.origin.startswith("omegaconf.") and type(value.state) is dict:
        inner = value.state.get("_content", value.state.get("_val", value))
        return value if inner is value else _without_omegaconf(inner)
    return value


# -- What of a value is plain --


def plain_entries(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that are plain data, and the names of those that had to be left out."""
    # An entry is a value, or in a dictionary one of its values: half of a callback's state would be worse than none.
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
    return not any(_others_in(value, lambda one: type(one) not in _SCALARS))


def _others_in(value: Any, is_other: Callable[[object], bool] = _is_inert, name: str = "") -> Iterator[str]:
    """Yield the places of other values in nested containers, keys included, and of which class each is."""
    if type(value) in _CONTAINERS:
        for key, part in (*value.items(), *getattr(value, "__dict__", {}).items()):
            yield from _others_in(key, is_other, name)
            yield from _others_in(part, is_other, f"{name}.{key}" if name else str(key))
    elif type(value) in _SEQUENCES:
        for part in value:
            yield from _others_in(part, is_other, name)
    elif is_other(value):
        yield f"{name} ({getattr(value, 'origin', '?')})".strip()


# -- A checkpoint of Lightning, of which a run needs no hyperparameter --

_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_THEIR_TYPES = ("hparams_type", "datamodule_hparams_type")
_MOST_NAMED = 5  # in one message
_TRUST = (
    "Expected plain data, because anything else could run code when it is read; none of it was run. If you trust the"
    " file, give weights_only=False to fit, validate, test or predict."
)


def load_without_objects(
    load: Callable[[Any, bool | None], dict[str, Any]], path: Any, weights_only: bool | None
) -> dict[str, Any]:
    """Return what ``load`` reads; if it has objects of classes, without the hyperparameters that are some."""
    try:
        return load(path, weights_only)
    except pickle.UnpicklingError as error:
        if weights_only is False:
            raise
        import fsspec  # type: ignore[import-untyped]

        try:
            with fsspec.open(str(path), "rb") as file:
                content = read_plain(file)
        except ConfigurationError:
            raise
        except UNREADABLE:
            raise error from None
    for key in _HYPERPARAMETERS:
        values = content.get(key)
        if type(values) is dict:
            content[key] = {name: one for name, one in values.items() if not any(_others_in({name: one}))}
        elif key in content:
            content[key] = {}
    for key in _THEIR_TYPES:
        content.pop(key, None)
    others = list(_others_in({key: value for key, value in content.items() if key != "state_dict"}))
    if others:
        raise ConfigurationError(f"{path}: holds objects of classes: {listed(others, _MOST_NAMED)}. {_TRUST}")
    return content  # type: ignore[no-any-return]
