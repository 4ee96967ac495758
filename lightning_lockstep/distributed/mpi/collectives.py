"""Collectives as operations of MPI: reductions, dense and sparse, and transfers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.distributed.mpi import operations
from lightning_lockstep.distributed.mpi.group_engine import Call, GroupPart, Prepared, collective, is_small
from lightning_lockstep.distributed.mpi.operations import (
    all_gather,
    all_gather_into,
    as_list,
    dense,
    equal_parts,
    one,
    parts_by_sizes,
    reduction,
    same,
)
from lightning_lockstep.distributed.mpi.progress import Body

# -- The sum of sparse tensors, such as the gradients of ``Embedding(sparse=True)`` --
# The ranks have different entries, of which each learns the number first; then every rank receives the
# entries of all and adds them in the order of the ranks, so that all have the same bits.
#
# This module is imported once MPI is up, never before.

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


# -- The collectives that reduce --
# This module is imported once MPI is up, never before.


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


# -- The collectives that move tensors and leave them as they are --
# This module is imported once MPI is up, never before.


class Transfers(GroupPart):
    """Broadcast, gathers, scatter, all-to-all and barrier of the process group."""

    @collective("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None) -> Prepared:
        tensor, root = one(tensors), getattr(opts, "rootRank", 0)
        call = Call("broadcast", [tensor], 0, [tensor], [tensor], tensor.nbytes, root=root)
        return call, lambda t: operations.broadcast(self._comm, t[0], root), opts, is_small(tensor)

    @collective("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Gather the tensor of every rank into a list, on every rank; the shapes of ranks may differ."""
        source, places = one(inputs), dense(one(outputs, of=list))
        same("all_gather", places, source, count=self._size, own=self._rank)
        shown = [source] if all(place.shape == source.shape for place in places) else places
        nbytes = max(place.nbytes for place in places)
        call = Call("all_gather", [source, *places], 1, shown, places, nbytes, compared=places)
        small = all(is_small(place) for place in places)
        return call, lambda t: operations.all_gather(self._comm, t[1:], t[0]), opts, small

    @collective("all_gather_into_tensor")
    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Prepared:
        """Gather the tensor of every rank into one, on every rank."""
        return self._gathered([output], [source], opts, "all_gather_into_tensor")

    @collective("all_gather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Gather several tensors of every rank, each into one, on every rank."""
        return self._gathered(outputs, inputs, opts, "all_gather_into_tensor_coalesced")

    def _gathered(self, outputs: Any, inputs: Any, opts: Any, name: str) -> Prepared:
        outputs, inputs = dense(outputs), dense(inputs)
        for output, source in zip(outputs, inputs, strict=True):
            equal_parts(name, output, source, self._size)
        count, comm = len(inputs), self._comm
        nbytes = max(source.nbytes for source in inputs)
        call = Call(name, [*inputs, *outputs], count, inputs, outputs, nbytes)

        def make(tensors: list[Tensor]) -> Body:
            for source, output in zip(tensors[:count], tensors[count:], strict=True):
                yield from operations.all_gather_into(comm, output, source)

        return call, make, opts, count == 1 and is_small(inputs[0])

    @collective("all_gather_coalesced")
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Gather several tensors of every rank into lists on every rank: gloo's ``outputs[rank][tensor]``."""
        inputs = dense(inputs)
        by_rank = [dense(places) for places in outputs]
        if [len(places) for places in by_rank] != [len(inputs)] * self._size:
            raise ValueError(
                f"all_gather_coalesced was given lists of {[len(places) for places in by_rank]} tensors: expected"
                f" {self._size} lists, one for each rank, of {len(inputs)} tensors, one for each that is sent."
            )
        by_tensor = [list(places) for places in zip(*by_rank, strict=True)]
        for places, source in zip(by_tensor, inputs, strict=True):
            same("all_gather_coalesced", places, source, count=self._size, own=self._rank)
        count, size = len(inputs), self._size
        tensors = [*inputs, *(place for places in by_tensor for place in places)]
        nbytes = max(source.nbytes for source in inputs)
        call = Call("all_gather_coalesced", tensors, count, inputs, outputs, nbytes)

        def make(tensors: list[Tensor]) -> Body:
            for i in range(count):
                places = tensors[count + i * size : count + (i + 1) * size]
                yield from operations.all_gather(self._comm, places, tensors[i])

        return call, make, opts, False

    @collective("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Gather the tensor of every rank into a list on the root."""
        source, root = one(inputs), opts.rootRank
        places = dense(one(outputs, of=list)) if root == self._rank else []
        if root == self._rank:
            same("gather", places, source, count=self._size)
        call = Call("gather", [source, *places], 1, [source], places, root=root)
        return call, lambda t: operations.gather(self._comm, t[1:], t[0], root), opts, is_small(source)

    @collective("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Give each rank one tensor of the root's list."""
        target, root = one(outputs), opts.rootRank
        sources = dense(one(inputs, of=list)) if root == self._rank else []
        if root == self._rank:
            same("scatter", sources, target, count=self._size)
        call = Call("scatter", [*sources, target], len(sources), [target], outputs, root=root)
        return call, lambda t: operations.scatter(self._comm, t[-1], t[:-1], root), opts, is_small(target)

    @collective("all_to_all_single")
    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Any = None,
        input_sizes: Any = None,
        opts: Any = None,
    ) -> Prepared:
        """Send a part of a tensor to each rank and put theirs together."""
        size = self._size
        places = parts_by_sizes("all_to_all_single", output, output_sizes or [], size)
        sources = parts_by_sizes("all_to_all_single", source, input_sizes or [], size)
        return self._exchange("all_to_all_single", places, sources, opts, [output])

    @collective("all_to_all")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Send a tensor to each rank and receive one from each."""
        places, sources = dense(as_list(outputs)), dense(as_list(inputs))
        if len(places) != self._size or len(sources) != self._size:
            raise ValueError(
                f"all_to_all was given {len(places)} output and {len(sources)} input tensors: expected"
                f" {self._size} of each, one for each rank."
            )
        return self._exchange("all_to_all", places, sources, opts, outputs)

    def _exchange(
        self, name: str, places: list[Tensor], sources: list[Tensor], opts: Any, result: Any
    ) -> Prepared:
        size, comm = self._size, self._comm
        call = Call(name, [*sources, *places], size, sources, result, compared=(), pairwise=True)
        small = all(is_small(source) for source in sources)
        return call, lambda t: operations.all_to_all(comm, t[size:], t[:size]), opts, small

    @collective("barrier")
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Prepared:
        if timeout is not None:
            opts = opts or dist.BarrierOptions()
            opts.timeout = timeout
        call = Call("barrier", [], 0, [], [])
        return call, lambda _: operations.barrier(self._comm), opts, True
