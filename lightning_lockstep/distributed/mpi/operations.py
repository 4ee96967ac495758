"""What each collective accepts, and what it does with MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from lightning_lockstep.distributed.mpi.progress import Body

# -- What a collective accepts, checked before anything is sent --

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


# -- What each collective does with MPI, on contiguous tensors in memory that MPI takes --
# Each operation is a generator as :mod:`progress` describes. It also yields :class:`Collective`, an MPI
# collective that whoever runs the operation carries out in one of two ways, the same on all ranks:
# blocking, which is faster for large tensors, or started and polled. Which MPI collectives an operation
# consists of depends only on what is the same on all ranks, never on where a rank's tensors lie. Memory is
# handed to MPI by address.
#
# Two numbers steer large messages. A reduction goes in pieces that stay in the cache of the CPU, which on
# one host is up to three times as fast as one large call. Transfers go in pieces of at most 2^30 elements,
# because MPI counts elements with 32 bits.
#
# This module is imported once MPI is up, never before.


class Limits:
    """Sizes at which a transfer is cut; tests lower them to walk the same paths with small tensors."""

    piece = 8 * 2**20  # of a reduction [bytes]
    count = 2**30  # of one MPI call [elements]
    polled = 2**16  # up to which a collective is never a blocking one [bytes]


LIMITS = Limits()

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
# Transfers without arithmetic need the size of an element only.
_BY_SIZE = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
_HALF = (torch.float16, torch.bfloat16)

_OPERATIONS = {
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
_ON_BOOLS = {**_OPERATIONS, "sum": MPI.MAX, "product": MPI.MIN}
_BITWISE = ("band", "bor", "bxor")

_TAG = 7  # of the messages inside gather, scatter and all-to-all; their group is used for nothing else


def check_reduction(tensor: Tensor, op: str) -> None:
    """Raise if MPI cannot reduce this."""
    if op not in _OPERATIONS:
        raise ValueError(f"The backend 'mpi4py' has no {op}: expected one of {', '.join(_OPERATIONS)}.")
    dtype = tensor.dtype
    if dtype in _TYPES:
        if op in _BITWISE and dtype.is_floating_point:
            raise ValueError(f"{op} works on bits and cannot reduce {dtype}: expected an integer dtype.")
        if op == "avg" and dtype is torch.bool:
            raise ValueError(f"{op} cannot reduce {dtype}: expected numbers; convert the tensor first.")
    elif not (op in ("sum", "avg") if tensor.is_complex() else dtype in _HALF and op not in _BITWISE):
        raise ValueError(f"The backend 'mpi4py' cannot reduce {dtype} with {op}: convert the tensor first.")


class Collective(NamedTuple):
    """One MPI collective, not yet started."""

    comm: Any
    name: str  # of the blocking method of mpi4py
    arguments: tuple[Any, ...]

    def block(self) -> None:
        """Carry it out, on all ranks by this method or on all by :meth:`start`."""
        getattr(self.comm, self.name)(*self.arguments)

    def start(self) -> Any:
        """Start it and return the request."""
        return getattr(self.comm, "I" + self.name.lower())(*self.arguments)


def barrier(comm: Any) -> Body:
    yield [comm.Ibarrier()]


def all_reduce(comm: Any, tensor: Tensor, op: str) -> Body:
    """Reduce in place on every rank."""
    work = _summable(tensor)
    mpi_op = _mpi_op(work, op)
    for piece in _pieces(work.view(-1), LIMITS.piece // work.element_size()):
        yield Collective(comm, "Allreduce", (MPI.IN_PLACE, _typed(piece), mpi_op))
    _finish(tensor, work, op, comm.size)


def reduce(comm: Any, tensor: Tensor, op: str, root: int) -> Body:
    """Reduce in place on ``root``; the others keep what they have."""
    work = _summable(tensor)
    mpi_op = _mpi_op(work, op)
    for piece in _pieces(work.view(-1), LIMITS.piece // work.element_size()):
        if comm.rank == root:
            yield Collective(comm, "Reduce", (MPI.IN_PLACE, _typed(piece), mpi_op, root))
        else:
            yield Collective(comm, "Reduce", (_typed(piece), None, mpi_op, root))
    if comm.rank == root:
        _finish(tensor, work, op, comm.size)


def broadcast(comm: Any, tensor: Tensor, root: int) -> Body:
    """Copy the tensor of ``root`` into that of every rank."""
    for piece in _pieces(tensor.view(-1), LIMITS.count):
        yield Collective(comm, "Bcast", (typed_by_size(piece), root))


def all_gather(comm: Any, outputs: Sequence[Tensor], source: Tensor) -> Body:
    """Put the input of rank ``i`` into ``outputs[i]`` of every rank."""
    # Small ones of equal size go in one call, by way of one tensor. Otherwise each rank's input is sent
    # straight into its place.
    sizes = {output.numel() for output in outputs}
    if len(sizes) == 1 and source.nbytes <= LIMITS.polled:
        whole = source.new_empty(source.numel() * comm.size)
        yield Collective(comm, "Allgather", (typed_by_size(source), typed_by_size(whole, source.numel())))
        for output, part in zip(outputs, whole.chunk(comm.size), strict=False):  # no parts of nothing
            output.view(-1).copy_(part)
        return
    outputs[comm.rank].view(-1).copy_(source.view(-1))
    for root, output in enumerate(outputs):
        yield from broadcast(comm, output, root)


def all_gather_into(comm: Any, output: Tensor, source: Tensor) -> Body:
    """Put the inputs of all ranks, one after another, into the output of every rank."""
    if source.numel() <= LIMITS.count // comm.size:
        yield Collective(comm, "Allgather", (typed_by_size(source), typed_by_size(output, source.numel())))
    else:
        yield from all_gather(comm, output.view(-1).chunk(comm.size), source)


def reduce_scatter(comm: Any, output: Tensor, inputs: Sequence[Tensor], op: str) -> Body:
    """Reduce ``inputs[i]`` of all ranks into the output of rank ``i``."""
    works = [_summable(part) for part in inputs]
    mpi_op, target = _mpi_op(works[0], op), _summable(output)
    equal = len({work.numel() for work in works}) == 1
    if equal and works[0].nbytes * len(works) <= LIMITS.piece:
        whole = _as_one(works)
        whole = torch.cat([work.view(-1) for work in works]) if whole is None else whole
        memory, _, datatype = _typed(whole)
        parts = [memory, target.numel(), datatype]
        yield Collective(comm, "Reduce_scatter_block", (parts, _typed(target.view(-1)), mpi_op))
    else:
        for root, work in enumerate(works):
            pieces = _pieces(work.view(-1), LIMITS.piece // work.element_size())
            places = _pieces(target.view(-1), LIMITS.piece // work.element_size())
            for piece in pieces:
                place = _typed(next(places)) if comm.rank == root else None
                yield Collective(comm, "Reduce", (_typed(piece), place, mpi_op, root))
    _finish(output, target, op, comm.size)


def gather(comm: Any, outputs: Sequence[Tensor], source: Tensor, root: int) -> Body:
    """Put the input of rank ``i`` into ``outputs[i]`` of ``root``."""
    if comm.rank != root:
        yield _started(comm.Isend, {root: source})
        return
    outputs[root].view(-1).copy_(source.view(-1))
    yield _started(comm.Irecv, _others(outputs, root))


def scatter(comm: Any, output: Tensor, inputs: Sequence[Tensor], root: int) -> Body:
    """Put ``inputs[i]`` of ``root`` into the output of rank ``i``."""
    if comm.rank != root:
        yield _started(comm.Irecv, {root: output})
        return
    output.view(-1).copy_(inputs[root].view(-1))
    yield _started(comm.Isend, _others(inputs, root))


def all_to_all(comm: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Body:
    """Put ``inputs[j]`` of rank ``i`` into ``outputs[i]`` of rank ``j``."""
    requests = _started(comm.Irecv, _others(outputs, comm.rank))
    outputs[comm.rank].view(-1).copy_(inputs[comm.rank].view(-1))
    yield requests + _started(comm.Isend, _others(inputs, comm.rank))


def _others(tensors: Sequence[Tensor], own: int) -> dict[int, Tensor]:
    return {rank: tensor for rank, tensor in enumerate(tensors) if rank != own}


def _started(transfer: Callable[..., Any], tensors: Mapping[int, Tensor]) -> list[Any]:
    """Send or receive a tensor of each rank, in pieces; return the requests."""
    return [
        transfer(typed_by_size(piece), rank, _TAG)
        for rank, tensor in tensors.items()
        for piece in counted(tensor)
    ]


def _typed(flat: Tensor) -> list[Any]:
    memory = MPI.buffer.fromaddress(flat.data_ptr(), flat.nbytes)
    return [memory, flat.numel(), _TYPES[flat.dtype]]


def typed_by_size(flat: Tensor, count: int | None = None) -> list[Any]:
    """Return what MPI is given to move a flat tensor: memory, number of elements, a datatype of their size."""
    memory = MPI.buffer.fromaddress(flat.data_ptr(), flat.nbytes)
    return [memory, flat.numel() if count is None else count, _BY_SIZE[flat.element_size()]]


def _pieces(flat: Tensor, elements: int) -> Iterator[Tensor]:
    elements = max(1, min(elements, LIMITS.count))
    if flat.numel() <= elements:
        yield flat
    else:
        yield from torch.split(flat, elements)


def counted(tensor: Tensor) -> Iterator[Tensor]:
    """Return the tensor in flat pieces, each with as many elements as MPI can count."""
    return _pieces(tensor.view(-1), LIMITS.count)


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return one flat tensor over the memory of all parts when they follow each other, else ``None``."""
    first, each = parts[0], parts[0].nbytes
    at = first.data_ptr()
    if any(part.nbytes != each or part.data_ptr() != at + i * each for i, part in enumerate(parts)):
        return None
    return first.as_strided((first.numel() * len(parts),), (1,))


def _summable(tensor: Tensor) -> Tensor:
    if tensor.dtype in _HALF:
        return tensor.float()  # MPI has no half precision; adding in float32 also loses less
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _mpi_op(tensor: Tensor, op: str) -> Any:
    return (_ON_BOOLS if tensor.dtype is torch.bool else _OPERATIONS)[op]


def _finish(tensor: Tensor, work: Tensor, op: str, size: int) -> None:
    if op == "avg":
        # Whole numbers are rounded towards zero, as nccl does; Lightning takes such means of flags.
        work.div_(size, rounding_mode=None if work.is_floating_point() else "trunc")
    if tensor.dtype in _HALF:
        tensor.copy_(work)
