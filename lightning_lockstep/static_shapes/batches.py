"""Batches with more samples, or longer sequences, than they came with."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

from lightning_lockstep.static_shapes.settings import Key

__all__ = [
    "longest_sequence",
    "missing_keys",
    "padded_samples",
    "padded_sequences",
    "samples_in",
    "tensors_of",
]


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch of any structure, in its order."""
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found


def samples_in(batch: Any) -> int | None:
    """Return how many samples a batch has, which is the first dimension of its first tensor that has one."""
    return next((tensor.size(0) for tensor in tensors_of(batch) if tensor.dim()), None)


def padded_samples(batch: Any, size: int, fill_values: Mapping[Key, float]) -> Any:
    """Return a batch of ``size`` samples: those of ``batch``, then its last one again or ``fill_values``.

    Tensors whose first dimension is not the number of samples stay as they are, as does all that is no tensor.
    """
    samples = samples_in(batch)
    if samples is None or samples >= size:
        return batch

    def padded(key: Key | None, tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.size(0) != samples:
            return tensor
        added = tensor[-1:].expand(size - samples, *tensor.shape[1:])
        if key is not None and key in fill_values:
            added = torch.full_like(added, fill_values[key])
        return torch.cat([tensor, added])

    return _with_tensors(batch, padded)


def padded_sequences(batch: Any, lengths: Sequence[int], values: Mapping[Key, float], dim: int) -> Any:
    """Return a batch whose sequences have one of the ``lengths``, which rise: the smallest that holds them.

    Longer ones stay as they are. ``values`` has, for each key that holds sequences, what pads them.
    """

    def padded(key: Key | None, tensor: Tensor) -> Tensor:
        if key is None or key not in values or tensor.dim() <= dim:
            return tensor
        place = bisect_left(lengths, tensor.size(dim))
        if place == len(lengths) or lengths[place] == tensor.size(dim):
            return tensor
        shape = [*tensor.shape[:dim], lengths[place] - tensor.size(dim), *tensor.shape[dim + 1 :]]
        return torch.cat([tensor, tensor.new_full(shape, values[key])], dim)

    return _with_tensors(batch, padded)


def longest_sequence(batch: Any, keys: Collection[Key], dim: int) -> int:
    """Return the length of the longest sequence of a batch; 0 where it has none."""
    found = [0]

    def look(key: Key | None, tensor: Tensor) -> Tensor:
        if key in keys and tensor.dim() > dim:
            found.append(tensor.size(dim))
        return tensor

    _with_tensors(batch, look)
    return max(found)


def missing_keys(batch: Any, keys: Sequence[Key]) -> list[Key]:
    """Return the keys that a batch does not have; for a list, positions in it."""
    there = _keys(batch)
    return [key for key in keys if key not in there]


def _keys(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch)
    return list(range(len(batch))) if isinstance(batch, (list, tuple)) else []


def _with_tensors(batch: Any, function: Callable[[Key | None, Tensor], Tensor]) -> Any:
    """Return a batch with ``function(key, tensor)`` in the place of each tensor; the batch itself stays."""

    def under(key: Key | None, value: Any) -> Any:
        return apply_to_collection(value, Tensor, lambda tensor: function(key, tensor))

    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        made.update({key: under(key, value) for key, value in batch.items()})
        return made
    if isinstance(batch, (list, tuple)):
        parts = [under(position, value) for position, value in enumerate(batch)]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return under(None, batch)
