"""The collectives that move tensors and leave them as they are.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor

from lightning_lockstep.distributed.mpi import operations
from lightning_lockstep.distributed.mpi.arguments import (
    as_list,
    dense,
    equal_parts,
    one,
    parts_by_sizes,
    same,
)
from lightning_lockstep.distributed.mpi.group_engine import Call, GroupPart, Prepared, collective, is_small
from lightning_lockstep.distributed.mpi.progress import Body

__all__ = ["Transfers"]


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
        call = Call("all_gather", [source, *places], 1, shown, outputs, nbytes, compared=places)
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
        call = Call("gather", [source, *places], 1, [source], outputs, root=root)
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
        call = Call("barrier", [], 0, [], [])
        return call, lambda _: operations.barrier(self._comm), opts, True
