"""Tensors of any dtype and shape, side by side in one row of bytes, and the two collectives that move such rows.

Bytes go through every backend alike, whatever it knows of bfloat16, bool or complex numbers, and one collective moves
any number of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Layout", "all_gather_rows", "carrying_device", "exchange_rows"]

# Each tensor begins at a multiple of it, so that its bytes can be viewed as its dtype [bytes].
_ALIGNMENT = 16
# Torch 2.13 has a new name for it.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a row of bytes."""

    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        """Length of the row [bytes]."""
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in self._sizes())

    def pack(self, tensors: Sequence[Tensor | None], row: Tensor) -> None:
        """Copy tensors into a row, ``(nbytes,)`` or longer; ``None`` leaves its place as it is."""
        for tensor, place in zip(tensors, self.unpack(row), strict=True):
            if tensor is not None:
                place.copy_(tensor)

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """Return each tensor as a view of a row, ``(nbytes,)`` or longer; of ``n`` rows ``(n, *shape)``."""
        return list(self._views(rows))

    def _views(self, rows: Tensor) -> Iterator[Tensor]:
        start = 0
        for dtype, shape, size in zip(self.dtypes, self.shapes, self._sizes(), strict=True):
            whole = (*rows.shape[:-1], *shape)
            if size:
                yield rows[..., start : start + size].view(dtype).view(whole)
            else:
                yield rows.new_empty(whole, dtype=dtype)
            start += -(-size // _ALIGNMENT) * _ALIGNMENT

    def _sizes(self) -> list[int]:
        return [prod(shape) * dtype.itemsize for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]


def carrying_device(group: dist.ProcessGroup, tensors: Sequence[Tensor] = ()) -> torch.device:
    """Return the device on which a group carries tensors: that of one of them, else the CPU, if it can.

    Their kinds of device are the same on every rank.
    """
    carried = [entry.partition(":")[0] for entry in str(dist.get_backend_config(group)).split(",")]
    for tensor in tensors:
        if tensor.device.type != "cpu" and tensor.device.type in carried:
            return tensor.device
    if "cpu" in carried:
        return torch.device("cpu")
    return torch.device(carried[0], torch.get_device_module(carried[0]).current_device())


def all_gather_rows(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks, ``(group size, n)``, each of ``n`` bytes."""
    size = dist.get_world_size(group)
    rows = row.new_empty(size * len(row))
    if len(row):
        _all_gather_single(rows, row, group=group)
    return rows.view(size, len(row))


def exchange_rows(
    rows: Tensor,  # one after another, rank 0's first
    lengths: Sequence[int],  # of each rank's row, the same on every rank
    group: dist.ProcessGroup,
) -> Tensor:
    """Send each rank a row of its own length, and return what each rank has sent to this one."""
    size, own = dist.get_world_size(group), lengths[dist.get_rank(group)]
    received = rows.new_empty(size * own)
    if any(lengths):
        dist.all_to_all_single(received, rows, [own] * size, list(lengths), group=group)
    return received.view(size, own)
