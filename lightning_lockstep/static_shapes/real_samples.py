"""Which samples of the current batch are real, for the step that is under way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.static_shapes.batches import samples_in, tensors_of

__all__ = ["CurrentBatch", "current", "mean_of_real", "real_samples"]


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
    """Return which samples of the current batch are real: ``(samples,)`` bool, on the device of the batch.

    All are, where nothing was added.
    """
    samples = samples_in(batch)
    if samples is None:
        raise ConfigurationError(
            f"StaticShapes.real_samples({type(batch).__name__}): expected the batch of the step, with a tensor whose"
            " first dimension is the samples."
        )
    mask, current.was_asked = current.mask, True
    if mask is None:
        return torch.ones(samples, dtype=torch.bool, device=tensors_of(batch)[0].device)
    if mask.size(0) != samples:
        raise ConfigurationError(
            f"StaticShapes.real_samples of a batch of {samples} samples: expected the whole batch of the step, of"
            f" {mask.size(0)}. Take the mask of the whole batch, and divide it as the batch is divided."
        )
    return mask


def mean_of_real(values: Tensor, batch: Any) -> Tensor:
    """Return the mean of ``values``, ``(samples, ...)``, over the real samples of the current batch.

    No shape depends on how many these are.
    """
    mask = real_samples(batch)
    if not values.dim() or values.size(0) != mask.size(0):
        raise ConfigurationError(
            f"StaticShapes.mean of values of shape {tuple(values.shape)}: expected {mask.size(0)} rows, one for each"
            ' sample. A loss function gives them with reduction="none".'
        )
    shaped = mask.view(-1, *[1] * (values.dim() - 1))
    # The mean over all, scaled: a sum of 16-bit values would overflow.
    return torch.where(shaped, values, 0).mean() * (mask.size(0) / mask.sum())
