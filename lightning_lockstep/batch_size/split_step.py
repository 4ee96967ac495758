"""A batch cut into micro-batches, and what they return and log put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the length of the first tensor found; 1 without one."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.ndim), 1)


def volume(batch: Any) -> int:
    """Return how many numbers a batch holds."""
    return sum(tensor.numel() for tensor in tensors_in(batch))


def split(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into that many micro-batches (one per sample at most), equal but for one sample."""
    # Tensors whose first dimension is the batch's are cut, and so are lists and tuples of that length that
    # hold no tensors; everything else goes into each part. Nothing is copied.
    samples = samples_in(batch)
    bounds = [samples * part // parts for part in range(parts + 1)]
    return [_cut(batch, samples, start, end) for start, end in pairwise(bounds)]


def _cut(batch: Any, samples: int, start: int, end: int) -> Any:
    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[start:end] if value.ndim and value.shape[0] == samples else value
        if not tensors_in(value):
            return value[start:end] if len(value) == samples else value
        items = [_cut(item, samples, start, end) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    return _with_each(batch, (Tensor, list, tuple), cut)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a batch of any structure, in its order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:  # returned, since a container may take nothing but tensors
        found.append(tensor)
        return tensor

    _with_each(value, Tensor, note)
    return found


def _with_each(value: Any, kinds: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function as ``apply_to_collection`` does, in a batch that is a frozen dataclass too."""
    settings = getattr(type(value), "__dataclass_params__", None)
    if settings is None or not settings.frozen or isinstance(value, kinds):
        return apply_to_collection(value, kinds, function)
    parts = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    return replace(value, **{name: _with_each(part, kinds, function) for name, part in parts.items()})


def merged_extra(extras: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Return what a training step returned in addition to the loss, as one step on the whole batch would have."""
    # Single numbers are averaged with the weights; tensors with one entry a sample are joined; of anything
    # else the first is taken.
    merged: dict[str, Any] = {}
    for key, first in extras[0].items():
        values = [extra[key] for extra in extras if key in extra]
        if isinstance(first, Tensor) and first.ndim and len(values) == len(extras):
            merged[key] = torch.cat(values) if all(v.shape[1:] == first.shape[1:] for v in values) else first
        else:
            merged[key] = _weighted_mean(values, weights)
    return merged


def _weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the mean of numbers or single-element tensors; of anything else, the first."""
    first = values[0]
    number = isinstance(first, (int, float)) and not isinstance(first, bool)
    number = number or (isinstance(first, Tensor) and first.is_floating_point())
    if not number or len(values) != len(weights):
        return first
    return sum(w * v for w, v in zip(weights, values, strict=True))


class LogRecord:
    """Stands in for ``LightningModule.log`` while the parts of a step run; then says what one batch would have."""

    # A value logged with ``sync_dist=True`` is a collective: the other ranks make one a step, so this one must.

    def __init__(self, log: Callable[..., None] | None = None) -> None:
        self._log = log  # who is told at once too
        self.parts: list[list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]] = []

    def begin_part(self) -> None:
        self.parts.append([])

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._log is not None:
            self._log(name, value, *args, **kwargs)
        detached = value.detach() if type(value) is Tensor else value
        self.parts[-1].append((name, detached, args, kwargs))

    def replay(self, log: Callable[..., None], weights: Sequence[float], *, skip: int) -> None:
        """Log each value once, averaged over the parts; the first ``skip`` were logged already."""
        for index, (name, _, args, kwargs) in enumerate(self.parts[0][skip:], skip):
            same = [part[index] for part in self.parts if index < len(part) and part[index][0] == name]
            if "batch_size" in kwargs and len(same) == len(self.parts):
                kwargs = {**kwargs, "batch_size": sum(call[3].get("batch_size", 0) for call in same)}
            log(name, _weighted_mean([call[1] for call in same], weights), *args, **kwargs)
