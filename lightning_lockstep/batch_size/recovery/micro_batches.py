"""A batch cut into micro-batches, and their outputs and logged values put together again."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["KnownSizes", "LogRecord", "merged_extra", "samples_in", "split", "volume"]


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the length of the first tensor found; 1 without one."""
    for tensor in _tensors(batch):
        if tensor.ndim:
            return int(tensor.shape[0])
    return 1


def volume(batch: Any) -> int:
    """Return how many numbers a batch holds."""
    return sum(tensor.numel() for tensor in _tensors(batch))


def split(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into that many micro-batches (one per sample at most), equal but for one sample.

    Tensors whose first dimension is the batch's are cut, and so are lists and tuples of that length that
    hold no tensors; everything else goes into each part. Nothing is copied.
    """
    samples = samples_in(batch)
    bounds = [samples * part // parts for part in range(parts + 1)]
    return [_cut(batch, samples, start, end) for start, end in pairwise(bounds)]


def _cut(value: Any, samples: int, start: int, end: int) -> Any:
    def deeper(item: Any) -> Any:
        return _cut(item, samples, start, end)

    if isinstance(value, Tensor):
        return value[start:end] if value.ndim and value.shape[0] == samples else value
    return _mapped(
        value, deeper, lambda sequence: sequence[start:end] if len(sequence) == samples else sequence
    )


def _mapped(value: Any, function: Callable[[Any], Any], plain: Callable[[Any], Any]) -> Any:
    if isinstance(value, UserDict):
        made = value.__class__.__new__(value.__class__)
        vars(made).update(vars(value))
        made.data = {key: function(item) for key, item in value.data.items()}
        return made
    if isinstance(value, Mapping):
        items = {key: function(item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: function(getattr(value, f.name)) for f in fields(value) if f.init})
    if isinstance(value, (list, tuple)):
        if not any(True for _ in _tensors(value)):
            return plain(value)
        items_ = [function(item) for item in value]
        return type(value)(*items_) if hasattr(value, "_fields") else type(value)(items_)
    return value


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, UserDict)):
        for item in value.values():
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def merged_extra(extras: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Return what a training step returned beside the loss, as one step on the whole batch would have.

    Single numbers are averaged with the weights; tensors with one entry a sample are joined; of anything else
    the first is taken.
    """
    merged: dict[str, Any] = {}
    for key, first in extras[0].items():
        values = [extra[key] for extra in extras if key in extra]
        if isinstance(first, Tensor) and first.ndim and len(values) == len(extras):
            merged[key] = torch.cat(values) if all(v.shape[1:] == first.shape[1:] for v in values) else first
        else:
            merged[key] = weighted_mean(values, weights)
    return merged


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the mean of numbers or single-element tensors; of anything else, the first."""
    first = values[0]
    number = isinstance(first, (int, float)) and not isinstance(first, bool)
    if len(values) != len(weights) or not (
        number or (isinstance(first, Tensor) and first.is_floating_point())
    ):
        return first
    return sum(w * v for w, v in zip(weights, values, strict=True))


@dataclass
class LogRecord:
    """Stands in for ``LightningModule.log`` while micro-batches run; says afterwards what one batch would have.

    A value logged with ``sync_dist=True`` is a collective: the other ranks make one a step, so this one must.
    """

    parts: list[list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]] = field(default_factory=list)

    def begin_part(self) -> None:
        self.parts.append([])

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        detached = value.detach() if type(value) is Tensor else value
        self.parts[-1].append((name, detached, args, kwargs))

    def replay(self, log: Callable[..., None], weights: Sequence[float], *, skip: int) -> None:
        """Log each value once, averaged over the micro-batches; the first ``skip`` were logged already."""
        for index, (name, _, args, kwargs) in enumerate(self.parts[0]):
            if index < skip:
                continue
            same = [part[index] for part in self.parts if index < len(part) and part[index][0] == name]
            if "batch_size" in kwargs and len(same) == len(self.parts):
                kwargs = {**kwargs, "batch_size": sum(call[3].get("batch_size", 0) for call in same)}
            log(name, weighted_mean([call[1] for call in same], weights), *args, **kwargs)


class KnownSizes:
    """Which volumes of a batch are known not to fit, and which of a micro-batch to fit.

    One failure may be an accident. After a second of at least that volume, such batches are too large.
    """

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._too_large: int | None = None
        self._known_good = 0

    @property
    def some_too_large(self) -> bool:
        """Whether any volume is known not to fit."""
        return self._too_large is not None

    def is_too_large(self, batch: Any) -> bool:
        """Whether a batch is known not to fit and can be cut."""
        return self._too_large is not None and volume(batch) >= self._too_large and samples_in(batch) >= 2

    def parts_for(self, size: int) -> int:
        """Return into how many parts to cut a batch of this volume that is too large."""
        return max(2, -(-size // max(1, self._known_good)))

    def learn(self, size: int, parts: int) -> None:
        """Note that a batch of this volume did not fit, and in that many parts did."""
        if self._suspect is not None and size >= self._suspect:
            self._too_large = min(self._suspect, self._too_large or self._suspect)
        self._suspect = size if self._suspect is None else min(self._suspect, size)
        self._known_good = max(1, size // parts)
