"""The table from torch's operations to those of MPI.

Each function of :data:`COLLECTIVES` is called as torch calls the method of that name: with tensors, lists of them or
lists of those, and options. It checks that they fit, since MPI is given addresses, and returns the operation as
a generator for the worker. Tensors are contiguous here.

All-reduce, reduce and broadcast are those of MPI. A reduction goes in pieces that stay in the cache of the CPU, which
on one host is up to twice as fast as one large call. Everything else is made of sends and receives straight from and
into the tensors, so the shapes of ranks may differ and nothing is copied. What is only moved is bytes for MPI, which
counts them with 32 bits, so no call has more than 2^30.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from lightning_lockstep.distributed.mpi.worker import Body
from lightning_lockstep.errors import CollectiveMismatchError

PIECE = 8 * 2**20  # of a reduction [bytes]
COUNT = 2**30  # of one call of MPI [bytes]
_WINDOW = 64  # messages to one rank under way at once
_TAG = 0  # of messages inside collectives; those of a caller have higher ones

_TYPES: dict[torch.dtype, Any] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.bool: MPI.UINT8_T,
}
_HALF = (torch.float16, torch.bfloat16)

_REDUCTIONS = {
    "sum": MPI.SUM,
    "avg": MPI.SUM,
    "product": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}
# True and False are the bytes 1 and 0, and must stay so: a sum of booleans is "any", a product is "all".
_OF_BOOLS = {**_REDUCTIONS, "sum": MPI.MAX, "product": MPI.MIN}


class Arguments(NamedTuple):
    """What a collective is told beside its tensors."""

    reduction: str | None  # such as ``sum``
    root: int | None  # in the group


# -- What MPI is asked to do --


def _reduced(group: Any, tensor: Tensor, reduction: str, root: int | None) -> Body:
    """Reduce in place, on all ranks or on the root; the others keep what they have."""
    comm = group.comm
    op = (_OF_BOOLS if tensor.dtype is torch.bool else _REDUCTIONS)[reduction]
    # MPI has no half precision; adding in float32 also loses less.
    work = tensor.float() if tensor.dtype in _HALF else tensor
    for piece in pieces(work, PIECE):
        memory = [memory_of(piece), piece.numel(), _TYPES[piece.dtype]]
        if root is None:
            request = comm.Iallreduce(MPI.IN_PLACE, memory, op)
        elif root == group.rank():
            request = comm.Ireduce(MPI.IN_PLACE, memory, op, root)
        else:
            request = comm.Ireduce(memory, None, op, root)
        yield [request.Test]
    if root not in (None, group.rank()):
        return
    if reduction == "avg":
        # Whole numbers are rounded towards zero, as nccl does; Lightning takes such means of flags.
        work.div_(group.size(), rounding_mode=None if work.is_floating_point() else "trunc")
    if work is not tensor:
        tensor.copy_(work)


def _broadcast(group: Any, tensor: Tensor, root: int) -> Body:
    for piece in pieces(tensor):
        yield [group.comm.Ibcast(memory_of(piece), root).Test]


def _exchanged(group: Any, outputs: Mapping[int, Tensor], inputs: Mapping[int, Tensor]) -> Body:
    """Receive each output from its rank, while each input is sent to its rank."""
    own = group.rank()
    expected = {rank: pieces(output) for rank, output in outputs.items() if rank != own}
    given = {rank: pieces(tensor) for rank, tensor in inputs.items() if rank != own}
    # With many thousands of messages under way at once, Open MPI takes minutes.
    for i in range(0, max(map(len, [*expected.values(), *given.values()]), default=0), _WINDOW):
        tests: list[Callable[[], bool]] = [
            Receive(group.comm, piece, rank, _TAG)
            for rank, parts in expected.items()
            for piece in parts[i : i + _WINDOW]
        ]
        tests += [
            group.comm.Isend(memory_of(piece), rank, _TAG).Test
            for rank, parts in given.items()
            for piece in parts[i : i + _WINDOW]
        ]
        yield tests
    if own in outputs:
        outputs[own].view(-1).copy_(inputs[own].view(-1))


class Receive:
    """One message to come, which may be shorter than the tensor has room for: MPI does not say so."""

    def __init__(self, comm: Any, flat: Tensor, rank: int, tag: int) -> None:
        self.status, self._room = MPI.Status(), flat.nbytes
        self._request = comm.Irecv(memory_of(flat), rank, tag)

    def __call__(self) -> bool:
        if not self._request.Test(self.status):
            return False
        if (found := self.status.Get_count(MPI.BYTE)) != self._room:
            raise CollectiveMismatchError(
                f"{found} bytes came from rank {self.status.source} of the group, but {self._room} were expected: make"
                " the sizes at both ends equal."
            )
        return True


def pieces(tensor: Tensor, size: int | None = None) -> Sequence[Tensor]:
    """Return the tensor in flat pieces of this many bytes, by default as many as MPI can count."""
    flat, elements = tensor.view(-1), max(1, (size or COUNT) // tensor.element_size())
    return (flat,) if flat.numel() <= elements else torch.split(flat, elements)


def memory_of(flat: Tensor) -> Any:
    # An array of numpy would know length and type too, but its tensor could not be resized any more.
    return MPI.buffer.fromaddress(flat.data_ptr(), flat.nbytes)


def _all(bodies: Iterable[Body]) -> Body:
    """Return several operations as one, all of which are checked before the first begins."""
    return chain.from_iterable([*bodies])


# -- Torch's operations: what they are given must fit, because MPI gets addresses --


def need(condition: bool, what: str) -> None:
    """Raise unless a condition holds; otherwise ``what`` says why not."""
    if not condition:
        raise ValueError(f"The backend 'mpi4py' cannot do this: {what}.")


def _one(given: Sequence[Any]) -> Any:
    need(len(given) == 1, f"each rank gives one tensor or one list of tensors; {len(given)} were given")
    return given[0]


def _parts(group: Any, given: Any, own: Tensor | None = None, rows: Sequence[int] = ()) -> dict[int, Tensor]:
    """Return the tensors for each rank, of a list or of a whole; this rank's is as large as ``own``."""
    size = group.size()
    if isinstance(given, Tensor) and rows:
        fits = len(rows) == size and given.shape[:1] == (sum(rows),)
        need(fits, f"the split sizes are {list(rows)} for a tensor of {tuple(given.shape)} and {size} ranks")
        given = torch.split(given, list(rows))
    elif isinstance(given, Tensor):
        need(given.numel() % size == 0, f"{tuple(given.shape)}: it must hold {size} parts of one size")
        given = given.view(size, given.numel() // size).unbind()
    need(len(given) == size, f"a list of {len(given)} tensors was given for {size} ranks")
    if own is not None:
        part = given[group.rank()]
        shapes = f"{tuple(part.shape)} and {tuple(own.shape)}"
        need(part.numel() == own.numel(), f"the two tensors for this rank have the shapes {shapes}")
    return dict(enumerate(given))


def _reduction(group: Any, tensor: Tensor, opts: Arguments, root: int | None = None) -> Body:
    name, dtype = str(opts.reduction), tensor.dtype
    known = name in _REDUCTIONS and (dtype in _TYPES or dtype in _HALF)
    bits = name in ("band", "bor", "bxor") and dtype.is_floating_point
    average = name == "avg" and dtype is torch.bool
    fits = known and not bits and not average
    need(fits, f"{dtype} cannot be reduced with {name}; convert the tensor first")
    return _reduced(group, tensor, name, root)


def _gather(group: Any, places: Any, tensor: Tensor) -> Body:
    parts = _parts(group, places, tensor)
    return _exchanged(group, parts, dict.fromkeys(parts, tensor))


def _gather_to(group: Any, outputs: Any, tensor: Tensor, root: int) -> Body:
    parts = _parts(group, _one(outputs), tensor) if root == group.rank() else {}
    return _exchanged(group, parts, {root: tensor})


def _scatter(group: Any, target: Tensor, inputs: Any, root: int) -> Body:
    parts = _parts(group, _one(inputs), target) if root == group.rank() else {}
    return _exchanged(group, {root: target}, parts)


def gathered(group: Any, data: bytes) -> Generator[list[Callable[[], bool]], None, list[bytes]]:
    """Gather data of each rank, and return them in the order of the group."""
    lengths = torch.zeros(group.size(), dtype=torch.int64)
    yield from _gather(group, lengths, torch.tensor([len(data)]))
    places = [torch.empty(length, dtype=torch.uint8) for length in lengths.tolist()]
    yield from _gather(group, places, torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return [bytes(place.tolist()) for place in places]


def _reduce_scatter(group: Any, target: Tensor, given: Any, opts: Arguments) -> Body:
    own, parts = group.rank(), _parts(group, given, target)
    reduced = [_reduction(group, {**parts, own: target}[rank], opts, rank) for rank in parts]

    def body() -> Body:
        target.view(-1).copy_(parts[own].view(-1))
        yield from _all(reduced)

    return body()


def _barrier(group: Any, opts: Arguments) -> Body:
    yield [group.comm.Ibarrier().Test]


#: By the name of torch's method: what the operation does, from the arguments of the method.
COLLECTIVES: dict[str, Callable[..., Body]] = {
    "allreduce": lambda group, tensors, opts: _reduction(group, _one(tensors), opts),
    "allreduce_coalesced": lambda group, tensors, opts: _all(_reduction(group, t, opts) for t in tensors),
    "reduce": lambda group, tensors, opts: _reduction(group, _one(tensors), opts, opts.root),
    "broadcast": lambda group, tensors, opts: _broadcast(group, _one(tensors), opts.root or 0),
    "allgather": lambda group, out, given, opts: _gather(group, _one(out), _one(given)),
    # Gloo's ``out[rank][tensor]``.
    "allgather_coalesced": lambda group, out, given, opts: _all(
        _gather(group, *pair) for pair in zip(zip(*out, strict=True), given, strict=True)
    ),
    "_allgather_base": lambda group, out, given, opts: _gather(group, out, given),
    "allgather_into_tensor_coalesced": lambda group, out, given, opts: _all(
        _gather(group, *pair) for pair in zip(out, given, strict=True)
    ),
    "gather": lambda group, out, given, opts: _gather_to(group, out, _one(given), opts.root),
    "scatter": lambda group, out, given, opts: _scatter(group, _one(out), given, opts.root),
    "reduce_scatter": lambda group, out, given, opts: _reduce_scatter(group, _one(out), _one(given), opts),
    "_reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": lambda group, out, given, opts: _all(
        _reduce_scatter(group, *pair, opts) for pair in zip(out, given, strict=True)
    ),
    "alltoall": lambda group, out, given, opts: _exchanged(group, _parts(group, out), _parts(group, given)),
    "alltoall_base": lambda group, out, given, out_sizes, sizes, opts: _exchanged(
        group, _parts(group, out, rows=out_sizes), _parts(group, given, rows=sizes)
    ),
    "barrier": _barrier,
}
