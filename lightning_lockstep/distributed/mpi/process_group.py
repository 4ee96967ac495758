"""What torch calls, turned into operations; messages between two ranks."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from lightning_lockstep.distributed.mpi.collectives import Reductions, Transfers
from lightning_lockstep.distributed.mpi.group_engine import GroupEngine, GroupSettings
from lightning_lockstep.distributed.mpi.operations import counted, one, typed_by_size
from lightning_lockstep.distributed.mpi.progress import Body
from lightning_lockstep.distributed.mpi.rank_check import CallRecords
from lightning_lockstep.distributed.mpi.runtime import MPIRuntime
from lightning_lockstep.errors import CollectiveMismatchError

# -- Messages between two ranks --
# MPI compares neither dtype nor, when the message is the shorter one, size. So each message is announced: a
# header with its dtype, its number of elements and a separate tag goes ahead, on the tag that the user
# chose. The receiver reads the header first, from whichever rank it is, and knows what follows.

_MESSAGE_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
    torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip
# To receive those that are not listed, which are known by their bytes.
_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
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
                f" {_dtype(code) if code >= 0 else f'a dtype of {-code} bytes'}, but expected"
                f" {tensor.numel()} of {tensor.dtype}: make both ends equal."
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
    return _MESSAGE_DTYPES.index(dtype) if dtype in _MESSAGE_DTYPES else -dtype.itemsize


def _dtype(code: int) -> torch.dtype:
    return _MESSAGE_DTYPES[code] if code >= 0 else _OF_BYTES[-code]


# -- The process group of the backend ``mpi4py``: what torch calls, turned into operations --
# This module is imported once MPI is up, never before.


class MPIProcessGroup(Reductions, Transfers, dist.ProcessGroup):
    """A group of ranks as an MPI communicator."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        runtime: MPIRuntime,
        collectives: Any,  # communicator
        messages: Any,  # communicator for sends and receives
        settings: GroupSettings,
    ) -> None:
        # Torch 2.13 takes no store here from a subclass in Python.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._name, self._desc = rank, size, settings.name, ""
        self.engine = GroupEngine(store, runtime, collectives, settings)
        self._comm, self._messages = collectives, Messages(messages, collectives)

    # -- name, rank and size ---------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "mpi4py"

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """Return this rank, in the group."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        return self._size

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch's name
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._desc

    def __repr__(self) -> str:
        return f"MPIProcessGroup({self._name!r}, rank {self._rank} of {self._size})"

    # -- messages --------------------------------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        tensor = one(tensors)
        return self.engine.message(
            f"send to {to}", tensor, lambda t: self._messages.send(t[0], to, tag), written=False
        )

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._receive(one(tensors), source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from whichever rank sends one first."""
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

    _allgather_base = Transfers.all_gather_single
    allgather_into_tensor_coalesced = Transfers.all_gather_single_coalesced
    _reduce_scatter_base = Reductions.reduce_scatter_single
    reduce_scatter_tensor_coalesced = Reductions.reduce_scatter_single_coalesced
    alltoall_base = Transfers.all_to_all_single

    @property
    def call_recorder(self) -> CallRecords:
        """The last collectives of the group, for the guard."""
        return self.engine.records

    @property
    def compares_calls(self) -> bool:
        """Whether the ranks are compared before each operation, so that nobody else needs to."""
        return self.engine.check is not None

    @property
    def supports_coalescing(self) -> bool:
        """Whether operations may be started one by one and waited for together."""
        return True

    def _start_coalescing(self, device: torch.device) -> None:
        self.engine.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.engine.end_coalescing()

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:  # torch 2.15 asks it whether it supports coalescing
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation waits for other ranks."""
        self.engine.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Abort the group: operations that come fail."""
        self.engine.abort()

    def shutdown(self) -> None:
        """Give the communicators back."""
        self.engine.free([self._messages.headers, self._comm])
