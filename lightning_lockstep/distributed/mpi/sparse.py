"""The sum of sparse tensors, such as the gradients of ``Embedding(sparse=True)``.

The ranks have different entries, of which each learns the number first; then every rank receives the entries of
all and adds them in the order of the ranks, so that all have the same bits.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep.distributed.mpi.group_engine import Call
from lightning_lockstep.distributed.mpi.operations import all_gather, all_gather_into
from lightning_lockstep.distributed.mpi.progress import Body

__all__ = ["all_reduce_sparse", "check_sparse", "sparse_call"]

# Those whose sparse tensors torch can add, and the half precisions, which are added in float32.
_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
_HALF = (torch.float16, torch.bfloat16)


def check_sparse(tensor: Tensor, op: str) -> None:
    """Raise if a sparse tensor cannot be reduced."""
    if op != "sum":
        raise ValueError(
            f"all_reduce was given {op} for a sparse tensor: expected sum. Call to_dense() first for"
            " another reduction."
        )
    if not tensor.is_cpu:
        raise ValueError(
            f"The backend 'mpi4py' cannot reduce a sparse tensor on device {tensor.device}: expected cpu;"
            " call cpu() or to_dense() first."
        )
    if tensor.dtype not in _DTYPES:
        raise ValueError(
            f"The backend 'mpi4py' cannot add sparse tensors of {tensor.dtype}: convert the tensor first."
        )


def sparse_call(tensor: Tensor, op: str) -> Call:
    """Return the call that reduces a sparse tensor; ranks must agree on shape, dtype and sparse dimensions."""
    # The size of the dense tensor stands for that of the largest MPI collective: all ranks know it.
    nbytes = tensor.numel() * tensor.element_size()
    note = f"sparse {tuple(tensor.shape)}, {tensor.sparse_dim()} sparse and {tensor.dense_dim()} dense dims"
    return Call("all_reduce", [], 0, [tensor], [tensor], nbytes, op, note=note)


def all_reduce_sparse(comm: Any, tensor: Tensor) -> Body:
    """Add the sparse tensors of all ranks in place; the result is coalesced."""
    own = tensor.detach().coalesce()
    entries = torch.tensor([own.indices().shape[1]])
    counts = entries.new_empty(comm.size)
    yield from all_gather_into(comm, counts, entries)
    indices = [own.indices().new_empty(own.sparse_dim(), count) for count in counts.tolist()]
    yield from all_gather(comm, indices, own.indices().contiguous())
    values = [own.values().new_empty(count, *own.values().shape[1:]) for count in counts.tolist()]
    yield from all_gather(comm, values, own.values().contiguous())
    parts = [_with(own, *part) for part in zip(indices, values, strict=True)]
    total = functools.reduce(operator.add, parts).coalesce()
    with torch.no_grad():
        tensor.copy_(total.to(tensor.dtype))


def _with(like: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Return a coalesced tensor that can be added without loss: the half precisions in float32."""
    wide = values.float() if values.dtype in _HALF else values
    return torch.sparse_coo_tensor(indices, wide, like.shape, is_coalesced=True, check_invariants=False)
