"""Batches padded to the same shapes: how, and which samples are real."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

from lightning_lockstep._settings import Faults, is_number, is_whole
from lightning_lockstep.batch_size.split_step import tensors_in
from lightning_lockstep.errors import ConfigurationError

# -- The settings of StaticShapes, checked together --

Key = str | int


@dataclass(frozen=True, kw_only=True)
class StaticShapesSettings:
    """The arguments of :class:`StaticShapes`, checked; see there."""

    last_batch: Literal["drop", "pad", "keep"] = "drop"
    evaluation_last_batch: Literal["pad", "keep"] = "keep"
    evaluation_at_training_size: bool = True
    fill_values: Mapping[Key, float] | None = None
    sequence_lengths: Sequence[int] = ()
    sequence_values: Mapping[Key, float] | None = None
    sequence_dim: int = 1

    def __post_init__(self) -> None:
        faults = Faults()
        faults.choice("last_batch", self.last_batch, ("drop", "pad", "keep"))
        faults.choice("evaluation_last_batch", self.evaluation_last_batch, ("pad", "keep"))
        faults.flag("evaluation_at_training_size", self.evaluation_at_training_size)
        faults.whole("sequence_dim", self.sequence_dim, what="a dimension of the tensors")
        self._check_lengths(faults)
        for name in ("fill_values", "sequence_values"):
            given = getattr(self, name)
            what = (
                "a value for each key of the batch (a position, where it is a list), such as {'labels': -100}"
            )
            faults.check(given is None or _are_values(given), name, given, what)
        if bool(self.sequence_lengths) != bool(self.sequence_values):
            faults.add(
                f"sequence_lengths={self.sequence_lengths!r} with sequence_values={self.sequence_values!r}: expected"
                " both or none: the lengths, and which tensors are padded to them with what."
            )
        if self.fill_values and "pad" not in (self.last_batch, self.evaluation_last_batch):
            faults.add(
                f"fill_values={self.fill_values!r} with last_batch={self.last_batch!r} and evaluation_last_batch="
                f"{self.evaluation_last_batch!r}: expected 'pad' for one of them, as nothing is padded otherwise."
            )
        faults.raise_all()

    def _check_lengths(self, faults: Faults) -> None:
        given = self.sequence_lengths
        # A string is a sequence too, and so are the lists of a configuration.
        is_right = isinstance(given, Sequence) and all(is_whole(one) and one > 0 for one in given)
        is_right = is_right and list(given) == sorted(set(given))
        faults.check(is_right, "sequence_lengths", given, "lengths that grow, such as [64, 128, 256]")

    def pads(self, stage: str) -> bool:
        """Return whether the last batch of a stage is padded."""
        return (self.last_batch if stage == "training" else self.evaluation_last_batch) == "pad"


def _are_values(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(key, (str, int)) and is_number(value) for key, value in given.items()
    )


# -- Batches with more samples, or longer sequences, than they came with --


def samples_in(batch: Any) -> int | None:
    """Return how many samples a batch has, which is the first dimension of its first tensor that has one."""
    return next((tensor.size(0) for tensor in tensors_in(batch) if tensor.dim()), None)


def padded_samples(batch: Any, size: int, fill_values: Mapping[Key, float]) -> Any:
    """Return a batch of ``size`` samples: those of ``batch``, then its last one again or ``fill_values``."""
    # Tensors whose first dimension is not the number of samples stay as they are, as does all that is no
    # tensor.
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
    """Return a batch whose sequences have the smallest of the rising ``lengths`` that holds them, if one does."""

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


# -- Which samples of the current batch are real, for the step that is under way --


class CurrentBatch:
    """What is known of the batch that a step computes now."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin again, without a batch."""
        self.mask: Tensor | None = None  # (samples,) bool, of the real ones; None: batches are not padded
        self.real: int | None = None  # how many are real; None: none was added
        self.was_asked = False  # whether the step has asked for the mask


# One step runs at a time in a process; the step finds its batch's mask here, whatever its batch looks like.
current = CurrentBatch()


def real_samples(batch: Any) -> Tensor:
    """Return which samples of the current batch are real: ``(samples,)`` bool, on the device of the batch."""
    # All are, where nothing was added.
    samples = samples_in(batch)
    if samples is None:
        raise ConfigurationError(
            f"StaticShapes.real_samples({type(batch).__name__}): expected the batch of the step, with a tensor whose"
            " first dimension is the samples."
        )
    mask, current.was_asked = current.mask, True
    if mask is None:
        return torch.ones(samples, dtype=torch.bool, device=tensors_in(batch)[0].device)
    if mask.size(0) != samples:
        raise ConfigurationError(
            f"StaticShapes.real_samples of a batch of {samples} samples: expected the whole batch of the step, of"
            f" {mask.size(0)}. Take the mask of the whole batch, and divide it as the batch is divided."
        )
    return mask


def mean_of_real(values: Tensor, batch: Any) -> Tensor:
    """Return the mean of ``values``, ``(samples, ...)``, over the real samples of the current batch."""
    # No shape depends on how many these are.
    mask = real_samples(batch)
    if not values.dim() or values.size(0) != mask.size(0):
        raise ConfigurationError(
            f"StaticShapes.mean of values of shape {tuple(values.shape)}: expected {mask.size(0)} rows, one for each"
            ' sample. A loss function gives them with reduction="none".'
        )
    shaped = mask.view(-1, *[1] * (values.dim() - 1))
    # The mean over all, scaled: a sum of 16-bit values would overflow.
    return torch.where(shaped, values, 0).mean() * (mask.size(0) / mask.sum())
