"""What a collective accepts, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["as_list", "dense", "equal_parts", "one", "parts_by_sizes", "reduction", "same"]

_NAMES = {
    getattr(dist.ReduceOp, name): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}


def as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def one(given: Any, of: type = Tensor) -> Any:
    """Return the one tensor, or the one list of tensors, that was given."""
    if isinstance(given, Tensor) and of is Tensor:
        return dense([given])[0]
    if not isinstance(given, (list, tuple)) or len(given) != 1:
        count = len(given) if isinstance(given, (list, tuple)) else type(given).__name__
        what = "tensor" if of is Tensor else "list of tensors"
        raise ValueError(f"The backend 'mpi4py' takes one {what} for each rank, but was given {count}.")
    if of is Tensor:
        return dense(given)[0]
    if isinstance(given[0], Tensor):
        return list(given)
    return given[0]


def dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors as a list if MPI can use each."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"The backend 'mpi4py' cannot send a {tensor.layout} tensor: call to_dense() first."
            )
        if not (tensor.is_cpu or tensor.is_cuda):
            raise ValueError(
                f"The backend 'mpi4py' cannot send a tensor on device {tensor.device}: expected cpu or cuda."
            )
        if tensor.device != tensors[0].device or tensor.dtype != tensors[0].dtype:
            raise ValueError(
                "All tensors of one operation must have one dtype and one device, but were given"
                f" {tensors[0].dtype} on {tensors[0].device} and {tensor.dtype} on {tensor.device}."
            )
    if not tensors:
        raise ValueError("The backend 'mpi4py' was given an empty list of tensors: expected at least one.")
    return list(tensors)


def reduction(options: Any) -> str:
    """Return the name of torch's reduction, without its parameters; a sum where none is given."""
    op = getattr(options, "reduceOp", options)
    if op is None:
        return "sum"
    op = getattr(op, "op", op)
    return _NAMES.get(op) or str(op)


def same(name: str, parts: Sequence[Tensor], tensor: Tensor, *, count: int, own: int | None = None) -> None:
    """Check a list with one tensor per rank: all are like ``tensor``, or the one of rank ``own`` is."""
    if len(parts) != count:
        raise ValueError(
            f"{name} was given a list of {len(parts)} tensors: expected {count}, one for each rank."
        )
    for rank in range(count) if own is None else (own,):
        if parts[rank].numel() != tensor.numel() or parts[rank].dtype != tensor.dtype:
            raise ValueError(
                f"{name} was given a list whose tensor for rank {rank} is {parts[rank].dtype} of shape"
                f" {tuple(parts[rank].shape)}: expected {tensor.dtype} of shape {tuple(tensor.shape)}."
            )
    if parts[0].device != tensor.device:
        raise ValueError(
            f"{name} was given tensors on {parts[0].device} and on {tensor.device}: expected one device."
        )


def equal_parts(name: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Check that ``whole`` is as large as ``size`` times ``part``."""
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype or whole.device != part.device:
        raise ValueError(
            f"{name} was given {whole.dtype} of shape {tuple(whole.shape)} on {whole.device} for the whole"
            f" and {part.dtype} of shape {tuple(part.shape)} on {part.device} for one rank's part: the whole"
            f" must hold {size} parts of the same dtype on the same device."
        )


def parts_by_sizes(name: str, whole: Tensor, sizes: Sequence[int], count: int) -> list[Tensor]:
    """Return the part of each rank: ``sizes[i]`` rows for rank ``i``, or equal ones without sizes."""
    dense([whole])
    rows = whole.shape[0] if whole.dim() else 0
    if not sizes:
        if rows % count:
            raise ValueError(
                f"{name} was given {rows} rows for {count} ranks: expected a multiple, or split sizes."
            )
        sizes = [rows // count] * count
    if len(sizes) != count or sum(sizes) != rows:
        raise ValueError(
            f"{name} was given the split sizes {list(sizes)} for {rows} rows and {count} ranks: expected"
            f" {count} sizes with the sum {rows}."
        )
    return list(torch.split(whole, list(sizes)))
