"""The process group of the backend ``mpi4py``: what torch calls, turned into operations.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.distributed import _mpi_operations as operations
from lightning_lockstep.distributed._mpi_arguments import (
    as_list,
    dense,
    equal_parts,
    one,
    parts_by_sizes,
    reduction,
    same,
)
from lightning_lockstep.distributed._mpi_engine import Call, GroupEngine, GroupSettings, Make
from lightning_lockstep.distributed._mpi_point_to_point import Messages
from lightning_lockstep.distributed._mpi_quick import QuickReductions
from lightning_lockstep.distributed._mpi_runtime import MPIRuntime
from lightning_lockstep.distributed._mpi_work import Body

__all__ = ["MPIProcessGroup"]

Prepared = tuple[Call, Make, Any, bool]


def _collective(prepare: Callable[..., Prepared]) -> Callable[..., Any]:
    """Make a collective of a function that looks at its arguments and says what to do."""

    @functools.wraps(prepare)
    def method(self: MPIProcessGroup, *args: Any, **options: Any) -> Any:
        try:
            call, make, opts, small = prepare(self, *args, **options)
        except (TypeError, ValueError) as error:
            raise self.engine.refuse(prepare.__name__, error) from None
        return self.engine.run(call, make, opts, small=small)

    return method


def _small(tensor: Tensor) -> bool:
    return tensor.nbytes <= operations.LIMITS.polled and not tensor.is_cuda


def _chain(bodies: Sequence[Body]) -> Body:
    for body in bodies:
        yield from body


class MPIProcessGroup(dist.ProcessGroup):
    """A group of ranks as an MPI communicator.

    Args:
        store: Store of the group.
        rank: This rank, in the group.
        size: Number of ranks of the group.
        runtime: MPI of this process.
        collectives: Communicator for collectives.
        messages: Communicator for sends and receives.
        settings: Settings of the group.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        runtime: MPIRuntime,
        collectives: Any,
        messages: Any,
        settings: GroupSettings,
    ) -> None:
        # Torch 2.13 takes no store here from a subclass in Python.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._name, self._desc = rank, size, settings.name, ""
        self.engine = GroupEngine(store, runtime, collectives, settings)
        self._comm, self._messages = collectives, Messages(messages, collectives)
        self._quick = QuickReductions(self.engine)

    # -- who we are ------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return ``mpi4py``."""
        return "mpi4py"

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """Return this rank, in the group."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """Return the number of ranks."""
        return self._size

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Set the name."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch's name
        """Set the description."""
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the description."""
        return self._desc

    def __repr__(self) -> str:
        return f"MPIProcessGroup({self._name!r}, rank {self._rank} of {self._size})"

    # -- collectives -----------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce a tensor in place on every rank.

        Ranks: all of the group.
        """
        return self._quick.run(tensors, opts) or self._all_reduce(tensors, opts)

    @_collective
    def _all_reduce(self, tensors: Any, opts: Any = None) -> Prepared:
        tensor, (op, shown) = one(tensors), reduction(opts)
        operations.check_reduction(tensor, op)
        comm, small = self._comm, _small(tensor)
        signature = ("all_reduce", op, tensor.dtype, tensor.shape)
        call = Call(f"all_reduce({shown})", signature, [tensor], 0, [tensor], [tensor])
        if small and tensor.is_contiguous():
            self._quick.remember(call, op)
        return call, lambda t: operations.all_reduce(comm, t[0], op, polled=small), opts, small

    @_collective
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Prepared:
        """Reduce several tensors in place on every rank.

        Ranks: all of the group.
        """
        tensors, (op, shown) = dense(as_list(tensors)), reduction(opts)
        for tensor in tensors:
            operations.check_reduction(tensor, op)
        signature = ("all_reduce_coalesced", op, *((t.dtype, t.shape) for t in tensors))
        call = Call(f"all_reduce_coalesced({shown})", signature, tensors, 0, tensors, tensors)
        comm = self._comm
        return call, lambda ts: _chain([operations.all_reduce(comm, t, op) for t in ts]), opts, False

    @_collective
    def reduce(self, tensors: Any, opts: Any = None) -> Prepared:
        """Reduce a tensor in place on the root.

        Ranks: all of the group.
        """
        tensor, (op, shown), root = one(tensors), reduction(opts), opts.rootRank
        operations.check_reduction(tensor, op)
        signature = ("reduce", op, root, tensor.dtype, tensor.shape)
        call = Call(f"reduce({shown}) to {root}", signature, [tensor], 0, [tensor], [tensor])
        return call, lambda t: operations.reduce(self._comm, t[0], op, root), opts, _small(tensor)

    @_collective
    def broadcast(self, tensors: Any, opts: Any = None) -> Prepared:
        """Copy the root's tensor to every rank.

        Ranks: all of the group.
        """
        tensor, root = one(tensors), getattr(opts, "rootRank", 0)
        signature = ("broadcast", root, tensor.dtype, tensor.shape)
        call = Call(f"broadcast from {root}", signature, [tensor], 0, [tensor], [tensor])
        return call, lambda t: operations.broadcast(self._comm, t[0], root), opts, _small(tensor)

    @_collective
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Gather the tensor of every rank into a list, on every rank; the shapes of ranks may differ.

        Ranks: all of the group, with lists of the same shapes.
        """
        source, places = one(inputs), dense(one(outputs, of=list))
        same("all_gather", places, source, count=self._size, own=self._rank)
        signature = ("all_gather", source.dtype, *(place.shape for place in places))
        call = Call("all_gather", signature, [source, *places], 1, [source], outputs)
        return call, lambda t: operations.all_gather(self._comm, t[1:], t[0]), opts, _small(source)

    @_collective
    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Prepared:
        """Gather the tensor of every rank into one, on every rank.

        Ranks: all of the group.
        """
        return self._gathered([output], [source], opts, "all_gather_into_tensor")

    @_collective
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Gather several tensors of every rank, each into one, on every rank.

        Ranks: all of the group.
        """
        return self._gathered(outputs, inputs, opts, "all_gather_into_tensor_coalesced")

    def _gathered(self, outputs: Any, inputs: Any, opts: Any, name: str) -> Prepared:
        outputs, inputs = dense(outputs), dense(inputs)
        for output, source in zip(outputs, inputs, strict=True):
            equal_parts(name, output, source, self._size)
        signature = (name, *((source.dtype, source.shape) for source in inputs))
        count, size, comm = len(inputs), self._size, self._comm
        call = Call(name, signature, [*inputs, *outputs], count, inputs, outputs)

        def make(tensors: list[Tensor]) -> Body:
            for source, output in zip(tensors[:count], tensors[count:], strict=True):
                yield from operations.all_gather(
                    comm, output.view(-1).chunk(size) if output.numel() else [output] * size, source
                )

        return call, make, opts, count == 1 and _small(inputs[0])

    @_collective
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Gather several tensors of every rank into lists, on every rank.

        Ranks: all of the group.
        """
        inputs = dense(inputs)
        by_tensor = [dense(places) for places in outputs]
        for places, source in zip(by_tensor, inputs, strict=True):
            same("all_gather_coalesced", places, source, count=self._size, own=self._rank)
        signature = ("all_gather_coalesced", *((source.dtype, source.shape) for source in inputs))
        count, size = len(inputs), self._size
        call = Call(
            "all_gather_coalesced",
            signature,
            [*inputs, *(place for places in by_tensor for place in places)],
            count,
            inputs,
            outputs,
        )

        def make(tensors: list[Tensor]) -> Body:
            for i in range(count):
                places = tensors[count + i * size : count + (i + 1) * size]
                yield from operations.all_gather(self._comm, places, tensors[i])

        return call, make, opts, False

    @_collective
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Gather the tensor of every rank into a list on the root.

        Ranks: all of the group.
        """
        source, root = one(inputs), opts.rootRank
        places = dense(one(outputs, of=list)) if root == self._rank else []
        if root == self._rank:
            same("gather", places, source, count=self._size)
        signature = ("gather", root, source.dtype, source.shape)
        call = Call(f"gather to {root}", signature, [source, *places], 1, [source], outputs)
        return call, lambda t: operations.gather(self._comm, t[1:], t[0], root), opts, _small(source)

    @_collective
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Give each rank one tensor of the root's list.

        Ranks: all of the group.
        """
        target, root = one(outputs), opts.rootRank
        sources = dense(one(inputs, of=list)) if root == self._rank else []
        if root == self._rank:
            same("scatter", sources, target, count=self._size)
        signature = ("scatter", root, target.dtype, target.shape)
        call = Call(f"scatter from {root}", signature, [*sources, target], len(sources), [target], outputs)
        return call, lambda t: operations.scatter(self._comm, t[-1], t[:-1], root), opts, _small(target)

    @_collective
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Reduce a list of tensors of all ranks, one to each rank.

        Ranks: all of the group, with lists of the same shapes.
        """
        target, sources, (op, shown) = one(outputs), dense(one(inputs, of=list)), reduction(opts)
        operations.check_reduction(target, op)
        same("reduce_scatter", sources, target, count=self._size, own=self._rank)
        signature = ("reduce_scatter", op, target.dtype, *(source.shape for source in sources))
        call = Call(f"reduce_scatter({shown})", signature, [*sources, target], self._size, sources, outputs)
        small = _small(target)
        return call, lambda t: operations.reduce_scatter(self._comm, t[-1], t[:-1], op), opts, small

    @_collective
    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Prepared:
        """Reduce a tensor of all ranks and give each rank its part.

        Ranks: all of the group.
        """
        return self._scattered([output], [source], opts, "reduce_scatter_tensor")

    @_collective
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
        call = Call(f"{name}({shown})", signature, [*inputs, *outputs], count, inputs, outputs)

        def make(tensors: list[Tensor]) -> Body:
            for source, output in zip(tensors[:count], tensors[count:], strict=True):
                parts = source.view(-1).chunk(size) if source.numel() else [source] * size
                yield from operations.reduce_scatter(self._comm, output, parts, op)

        return call, make, opts, count == 1 and _small(inputs[0])

    @_collective
    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Any = None,
        input_sizes: Any = None,
        opts: Any = None,
    ) -> Prepared:
        """Send a part of a tensor to each rank and put theirs together.

        Ranks: all of the group; what ``i`` sends to ``j`` must be as large as ``j`` expects from ``i``.
        """
        size = self._size
        places = parts_by_sizes("all_to_all_single", output, output_sizes or [], size)
        sources = parts_by_sizes("all_to_all_single", source, input_sizes or [], size)
        return self._exchange("all_to_all_single", places, sources, opts, [output])

    @_collective
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Prepared:
        """Send a tensor to each rank and receive one from each.

        Ranks: all of the group; what ``i`` sends to ``j`` must be as large as ``j`` expects from ``i``.
        """
        places, sources = dense(as_list(outputs)), dense(as_list(inputs))
        if len(places) != self._size or len(sources) != self._size:
            raise ValueError(
                f"all_to_all was given {len(places)} output and {len(sources)} input tensors: expected"
                f" {self._size} of"
                " each, one for each rank."
            )
        return self._exchange("all_to_all", places, sources, opts, outputs)

    def _exchange(
        self, name: str, places: list[Tensor], sources: list[Tensor], opts: Any, result: Any
    ) -> Prepared:
        size, comm, checked = self._size, self._comm, self.engine.check
        call = Call(name, (name, places[0].dtype), [*sources, *places], size, sources, result)

        def make(tensors: list[Tensor]) -> Body:
            if checked is not None:
                yield from checked.agree_on_sizes(tensors[size:], tensors[:size], self.engine.number, name)
            yield from operations.all_to_all(comm, tensors[size:], tensors[:size])

        return call, make, opts, all(_small(source) for source in sources)

    @_collective
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Prepared:
        """Wait until every rank has come.

        Ranks: all of the group.
        """
        call = Call("barrier", ("barrier",), [], 0, [], [])
        return call, lambda _: operations.barrier(self._comm), opts, True

    # -- messages --------------------------------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        """Send a tensor to a rank.

        Ranks: this one, and ``to`` with :meth:`recv`.
        """
        tensor = one(tensors)
        return self.engine.message(
            f"send to {to}", tensor, lambda t: self._messages.send(t[0], to, tag), written=False
        )

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        """Receive a tensor from a rank.

        Ranks: this one, and ``source`` with :meth:`send`.
        """
        return self._receive(one(tensors), source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from whichever rank sends one first.

        Ranks: this one, and any other with :meth:`send`.
        """
        return self._receive(one(tensors), None, tag)

    def _receive(self, tensor: Tensor, source: int | None, tag: int) -> Any:
        sender: list[int] = []
        name = "receive from any rank" if source is None else f"receive from {source}"
        work = self.engine.message(
            name, tensor, lambda t: self._messages.receive(t[0], source, tag, sender.append), written=True
        )
        work.senders = sender
        return work

    # -- the rest of torch's contract ------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    @property
    def supports_coalescing(self) -> bool:
        """Whether operations may be started one by one and waited for together."""
        return True

    def _start_coalescing(self, device: torch.device) -> None:
        self.engine.collected = []

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.engine.all_collected()

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation waits for other ranks.

        Ranks: all of the group, alike.
        """
        self.engine.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Give up the group: whatever waits or comes fails.

        Ranks: any rank, alone.
        """
        self.engine.give_up()

    def shutdown(self) -> None:
        """Give the communicators back.

        Ranks: every rank of the group; waits for nobody.
        """
        self.engine.free([self._messages.headers, self._comm])
