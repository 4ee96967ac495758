"""The collectives that reduce.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep.distributed.mpi import operations
from lightning_lockstep.distributed.mpi.arguments import (
    as_list,
    dense,
    equal_parts,
    one,
    reduction,
    same,
)
from lightning_lockstep.distributed.mpi.group_engine import Call, GroupPart, Prepared, collective, is_small
from lightning_lockstep.distributed.mpi.progress import Body
from lightning_lockstep.distributed.mpi.sparse import all_reduce_sparse, check_sparse, sparse_call

__all__ = ["Reductions"]


class Reductions(GroupPart):
    """All-reduce, reduce and reduce-scatter of the process group."""

    @collective("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None) -> Prepared:
        """Reduce a tensor in place on every rank; sparse ones by sum, with any number of entries per rank."""
        comm, op, tensors = self._comm, reduction(opts), as_list(tensors)
        if [tensor.layout for tensor in tensors] == [torch.sparse_coo]:
            tensor = tensors[0]
            check_sparse(tensor, op)
            return sparse_call(tensor, op), lambda _: all_reduce_sparse(comm, tensor), opts, False
        tensor = one(tensors)
        operations.check_reduction(tensor, op)
        call = Call("all_reduce", [tensor], 0, [tensor], [tensor], tensor.nbytes, op)
        return call, lambda t: operations.all_reduce(comm, t[0], op), opts, is_small(tensor)

    @collective("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Prepared:
        """Reduce several tensors in place on every rank."""
        tensors, op = dense(as_list(tensors)), reduction(opts)
        for tensor in tensors:
            operations.check_reduction(tensor, op)
        call = Call("all_reduce_coalesced", tensors, 0, tensors, tensors, _most(tensors), op)

        def make(parts: list[Tensor]) -> Body:
            for part in parts:
                yield from operations.all_reduce(self._comm, part, op)

        return call, make, opts, False

    @collective("reduce")
    def reduce(self, tensors: Any, opts: Any = None) -> Prepared:
        """Reduce a tensor in place on the root."""
        tensor, op, root = one(tensors), reduction(opts), opts.rootRank
        operations.check_reduction(tensor, op)
        call = Call("reduce", [tensor], 0, [tensor], [tensor], tensor.nbytes, op, root)
        return call, lambda t: operations.reduce(self._comm, t[0], op, root), opts, is_small(tensor)

    @collective("reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Reduce a list of tensors of all ranks, one to each rank."""
        target, sources, op = one(outputs), dense(one(inputs, of=list)), reduction(opts)
        operations.check_reduction(target, op)
        same("reduce_scatter", sources, target, count=self._size, own=self._rank)
        nbytes = sum(source.nbytes for source in sources)
        call = Call("reduce_scatter", [*sources, target], self._size, sources, outputs, nbytes, op)
        small = all(is_small(source) for source in sources)
        return call, lambda t: operations.reduce_scatter(self._comm, t[-1], t[:-1], op), opts, small

    @collective("reduce_scatter_tensor")
    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Prepared:
        """Reduce a tensor of all ranks and give each rank its part."""
        return self._scattered([output], [source], opts, "reduce_scatter_tensor")

    @collective("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Reduce several tensors of all ranks and give each rank its parts."""
        return self._scattered(outputs, inputs, opts, "reduce_scatter_tensor_coalesced")

    def _scattered(self, outputs: Any, inputs: Any, opts: Any, name: str) -> Prepared:
        outputs, inputs, op = dense(outputs), dense(inputs), reduction(opts)
        for output, source in zip(outputs, inputs, strict=True):
            operations.check_reduction(output, op)
            equal_parts(name, source, output, self._size)
        count, size = len(inputs), self._size
        call = Call(name, [*inputs, *outputs], count, inputs, outputs, _most(inputs), op)

        def make(tensors: list[Tensor]) -> Body:
            for source, output in zip(tensors[:count], tensors[count:], strict=True):
                parts = source.view(-1).chunk(size) if source.numel() else [source] * size
                yield from operations.reduce_scatter(self._comm, output, parts, op)

        return call, make, opts, count == 1 and is_small(inputs[0])


def _most(tensors: Sequence[Tensor]) -> int:
    return max(tensor.nbytes for tensor in tensors)
