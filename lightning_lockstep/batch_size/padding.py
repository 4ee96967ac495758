"""Batches padded to a number of samples and to lengths of sequences, and which of their samples are real."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

from lightning_lockstep.batch_size.split_step import samples_in, tensors_in
from lightning_lockstep.errors import ConfigurationError

# -- Batches with more samples, or longer sequences, than they came with --

Key = str | int


def with_samples(batch: Any, size: int, ignored: Mapping[Key, float]) -> Any:
    """Return a batch of ``size`` samples: those of ``batch``, then copies of its last, with ``ignored`` values."""
    samples = samples_in(batch)
    if samples >= size:
        return batch

    def padded(key: Key | None, tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.size(0) != samples:
            return tensor
        added = tensor[-1:].expand(size - samples, *tensor.shape[1:])
        if key is not None and key in ignored:
            added = torch.full_like(added, ignored[key])
        return torch.cat([tensor, added])

    return _with_tensors(batch, padded)


def with_lengths(batch: Any, lengths: Sequence[int], values: Mapping[Key, float], dim: int) -> Any:
    """Return a batch whose sequences are padded to the smallest of the growing ``lengths`` that holds them."""

    def padded(key: Key | None, tensor: Tensor) -> Tensor:
        if key is None or key not in values or tensor.dim() <= dim:
            return tensor
        place = bisect_left(lengths, tensor.size(dim))
        if place == len(lengths) or lengths[place] == tensor.size(dim):
            return tensor
        shape = [*tensor.shape[:dim], lengths[place] - tensor.size(dim), *tensor.shape[dim + 1 :]]
        return torch.cat([tensor, tensor.new_full(shape, values[key])], dim)

    return _with_tensors(batch, padded)


def parts(batch: Any) -> dict[Any, Any]:
    """Return the parts of a batch by key, or by position if it is a list; by ``None`` if it is neither."""
    if isinstance(batch, MutableMapping):
        return dict(batch)
    return dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else {None: batch}


def _with_tensors(batch: Any, function: Callable[[Key | None, Tensor], Tensor]) -> Any:
    """Return a batch with ``function(key, tensor)`` in place of each tensor; the given batch does not change."""
    made = {
        key: apply_to_collection(value, Tensor, partial(function, key)) for key, value in parts(batch).items()
    }
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        changed.update(made)
        return changed
    if isinstance(batch, (list, tuple)):
        is_named = hasattr(batch, "_fields")
        return type(batch)(*made.values()) if is_named else type(batch)(made.values())
    return made[None]


# -- Which samples of the current batch are real, for the current step --


class CurrentBatch:
    """What is known of the batch that a step computes now."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset, for a batch that is not padded."""
        # (samples,) bool on the CPU, True for the real samples; None: no batch of the loader is padded.
        self.mask: Tensor | None = None
        self.was_asked = False  # whether the step has asked for the mask


# Only one step at a time runs in a process. The mask is kept here, because a batch may have no place for it.
current = CurrentBatch()


def real_samples(batch: Any) -> Tensor:
    """Return which samples of the current batch are real: ``(samples,)`` bool, on the device of the batch."""
    samples, tensors = samples_in(batch), tensors_in(batch)
    if not any(tensor.dim() for tensor in tensors):
        raise ConfigurationError(
            f"StaticShapes.real_samples({type(batch).__name__}): expected the batch of the step, with a tensor whose"
            " first dimension is the samples."
        )
    mask, current.was_asked = current.mask, True
    device = tensors[0].device
    if mask is None:
        return torch.ones(samples, dtype=torch.bool, device=device)
    if mask.size(0) != samples:
        raise ConfigurationError(
            f"StaticShapes.real_samples of a batch of {samples} samples: expected the whole batch of the step, of"
            f" {mask.size(0)}. Take the mask of the whole batch, and divide it like the batch."
        )
    return mask.to(device, non_blocking=True)


def mean_of_real(values: Tensor, batch: Any) -> Tensor:
    """Return the mean of ``values``, ``(samples, ...)``, over the real samples of the current batch."""
    mask = real_samples(batch)
    if not values.dim() or values.size(0) != mask.size(0):
        raise ConfigurationError(
            f"StaticShapes.mean of values of shape {tuple(values.shape)}: expected {mask.size(0)} rows, one for each"
            ' sample. A loss function gives them with reduction="none".'
        )
    shaped = mask.view(-1, *[1] * (values.dim() - 1))
    # The mean over all is scaled, because a sum of 16-bit values would overflow.
    return torch.where(shaped, values, 0).mean() * (mask.size(0) / mask.sum())
