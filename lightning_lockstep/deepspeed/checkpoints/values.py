"""Views of the values of a parameter, which may lie in the files of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_lockstep.deepspeed.checkpoints.plain_file import Allocate

__all__ = ["Values", "count", "cut", "flat"]


@dataclass(frozen=True)
class Values:
    """The values of a parameter, where they are."""

    shape: Sequence[int]  # of the whole tensor
    dtype: torch.dtype  # in which it is to be written
    parts: Sequence[Tensor]  # of one dimension; one after the other they are the flat parameter

    def of(self, dtype: torch.dtype) -> Values:
        """Return the same values, to be written as ``dtype``."""
        return replace(self, dtype=dtype)

    def copy_to(self, allocate: Allocate) -> Tensor:
        """Return the whole tensor in memory of its own."""
        whole = allocate(self.shape, self.dtype)
        vector, start = whole.view(-1), 0
        for part in self.parts:
            vector[start : start + part.numel()].copy_(part)
            start += part.numel()
        return whole


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor as a vector, without a copy where it is contiguous."""
    return tensor.detach().reshape(-1)


def count(parts: Sequence[Tensor]) -> int:
    """Return how many values some tensors have together."""
    return sum(part.numel() for part in parts)


def cut(parts: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
    """Return views of ``length`` elements from ``start`` on of vectors that follow each other."""
    found = []
    for part in parts:
        piece = part[start : start + length] if length and start < part.numel() else part[:0]
        if piece.numel():
            found.append(piece)
        length -= piece.numel()
        start = max(0, start - part.numel())
    return found
