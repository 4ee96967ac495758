"""Messages between two ranks.

MPI compares neither dtype nor, when the message is the shorter one, size. So each message is announced: a
header with its dtype, its number of elements and a tag of its own goes ahead, on the tag that the user chose.
The receiver reads the header first, from whichever rank it is, and knows what follows.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy
import torch
from mpi4py import MPI
from torch import Tensor

from lightning_lockstep.distributed.mpi.operations import counted, typed_by_size
from lightning_lockstep.distributed.mpi.progress import Body
from lightning_lockstep.errors import CollectiveMismatchError

__all__ = ["Messages"]

_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
    torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip
_FIRST_TAG, _TAGS = 1000, 30_000  # MPI guarantees tags up to 32767


class Messages:
    """Sends and receives within one group."""

    def __init__(self, headers: Any, data: Any) -> None:
        self.headers, self._data = headers, data  # communicators: for headers, and for what follows them
        self._tags = itertools.count()

    def send(self, tensor: Tensor, to: int, tag: int) -> Body:
        own_tag = _FIRST_TAG + next(self._tags) % _TAGS
        header = numpy.array([_code(tensor.dtype), tensor.numel(), own_tag], numpy.int64)
        requests = [self.headers.Isend([header, 3, MPI.INT64_T], to, tag)]
        requests += [self._data.Isend(typed_by_size(piece), to, own_tag) for piece in counted(tensor)]
        yield requests

    def receive(self, tensor: Tensor, source: int | None, tag: int, found: Any) -> Body:
        """Receive a tensor from rank ``source`` or, when that is ``None``, from any rank."""
        header = numpy.zeros(3, numpy.int64)
        status = MPI.Status()
        request = self.headers.Irecv(
            [header, 3, MPI.INT64_T], MPI.ANY_SOURCE if source is None else source, tag
        )
        yield [_WithStatus(request, status)]
        sender = status.Get_source()
        code, count, own_tag = (int(number) for number in header)
        fits = code == _code(tensor.dtype) and count == tensor.numel()
        target = tensor if fits else torch.empty(count, dtype=_dtype(code))
        yield [self._data.Irecv(typed_by_size(piece), sender, own_tag) for piece in counted(target)]
        if not fits:  # it has been received all the same
            raise CollectiveMismatchError(
                f"rank {self.headers.rank} received from rank {sender} (tag {tag}) {count} elements of"
                f" {_dtype(code)}, but expected {tensor.numel()} of {tensor.dtype}: make both ends equal."
            )
        found(sender)


class _WithStatus:
    """A request that keeps who sent it."""

    def __init__(self, request: Any, status: Any) -> None:
        self._request, self._status, self._done = request, status, False

    def Test(self) -> bool:  # noqa: N802 - the name MPI requests have
        # A request that is done becomes the null request, whose status would overwrite the real one.
        self._done = self._done or self._request.Test(self._status)
        return self._done


def _code(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype) if dtype in _DTYPES else -dtype.itemsize


def _dtype(code: int) -> torch.dtype:
    return _DTYPES[code] if code >= 0 else torch.uint8
