"""The collectives that reduce.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from lightning_lockstep.distributed.mpi.collective import GroupPart, Prepared, collective, is_small
from lightning_lockstep.distributed.mpi.group_engine import Call
from lightning_lockstep.distributed.mpi.node_memory import NodeMemory
from lightning_lockstep.distributed.mpi.progress import Body
from lightning_lockstep.distributed.mpi.quick import QuickReductions

__all__ = ["Reductions"]


class Reductions(GroupPart):
    """All-reduce, reduce and reduce-scatter of the process group."""

    _quick: QuickReductions
    _memory: NodeMemory | None

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce a tensor in place on every rank.

        Ranks: all of the group.
        """
        return self._quick.run(tensors, opts) or self._all_reduce(tensors, opts)

    @collective
    def _all_reduce(self, tensors: Any, opts: Any = None) -> Prepared:
        tensor, (op, shown) = one(tensors), reduction(opts)
        operations.check_reduction(tensor, op)
        comm, memory, small = self._comm, self._memory, is_small(tensor)
        signature = ("all_reduce", op, tensor.dtype, tensor.shape)
        call = Call(f"all_reduce({shown})", signature, [tensor], 0, [tensor], [tensor], tensor.nbytes)
        if small and tensor.is_contiguous():
            self._quick.remember(call, op)
        return call, lambda t: operations.all_reduce(comm, t[0], op, memory), opts, small

    @collective
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Prepared:
        """Reduce several tensors in place on every rank.

        Ranks: all of the group.
        """
        tensors, (op, shown) = dense(as_list(tensors)), reduction(opts)
        for tensor in tensors:
            operations.check_reduction(tensor, op)
        signature = ("all_reduce_coalesced", op, *((t.dtype, t.shape) for t in tensors))
        call = Call(f"all_reduce_coalesced({shown})", signature, tensors, 0, tensors, tensors, _most(tensors))

        def make(parts: list[Tensor]) -> Body:
            for part in parts:
                yield from operations.all_reduce(self._comm, part, op, self._memory)

        return call, make, opts, False

    @collective
    def reduce(self, tensors: Any, opts: Any = None) -> Prepared:
        """Reduce a tensor in place on the root.

        Ranks: all of the group.
        """
        tensor, (op, shown), root = one(tensors), reduction(opts), opts.rootRank
        operations.check_reduction(tensor, op)
        signature = ("reduce", op, root, tensor.dtype, tensor.shape)
        call = Call(f"reduce({shown}) to {root}", signature, [tensor], 0, [tensor], [tensor], tensor.nbytes)
        return call, lambda t: operations.reduce(self._comm, t[0], op, root), opts, is_small(tensor)

    @collective
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Reduce a list of tensors of all ranks, one to each rank.

        Ranks: all of the group, with lists of the same shapes.
        """
        target, sources, (op, shown) = one(outputs), dense(one(inputs, of=list)), reduction(opts)
        operations.check_reduction(target, op)
        same("reduce_scatter", sources, target, count=self._size, own=self._rank)
        signature = ("reduce_scatter", op, target.dtype, *(source.shape for source in sources))
        name, nbytes = f"reduce_scatter({shown})", sum(source.nbytes for source in sources)
        call = Call(name, signature, [*sources, target], self._size, sources, outputs, nbytes)
        small = all(is_small(source) for source in sources)
        return call, lambda t: operations.reduce_scatter(self._comm, t[-1], t[:-1], op), opts, small

    @collective
    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Prepared:
        """Reduce a tensor of all ranks and give each rank its part.

        Ranks: all of the group.
        """
        return self._scattered([output], [source], opts, "reduce_scatter_tensor")

    @collective
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Reduce several tensors of all ranks and give each rank its parts.

        Ranks: all of the group.
        """
        return self._scattered(outputs, inputs, opts, "reduce_scatter_tensor_coalesced")

    def _scattered(self, outputs: Any, inputs: Any, opts: Any, name: str) -> Prepared:
        outputs, inputs, (op, shown) = dense(outputs), dense(inputs), reduction(opts)
        for output, source in zip(outputs, inputs, strict=True):
            operations.check_reduction(output, op)
            equal_parts(name, source, output, self._size)
        signature = (name, op, *((source.dtype, source.shape) for source in inputs))
        count, size = len(inputs), self._size
        name = f"{name}({shown})"
        call = Call(name, signature, [*inputs, *outputs], count, inputs, outputs, _most(inputs))

        def make(tensors: list[Tensor]) -> Body:
            for source, output in zip(tensors[:count], tensors[count:], strict=True):
                parts = source.view(-1).chunk(size) if source.numel() else [source] * size
                yield from operations.reduce_scatter(self._comm, output, parts, op)

        return call, make, opts, count == 1 and is_small(inputs[0])


def _most(tensors: Sequence[Tensor]) -> int:
    return max(tensor.nbytes for tensor in tensors)
