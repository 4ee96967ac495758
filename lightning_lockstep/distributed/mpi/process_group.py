"""The process group of the backend ``mpi4py``, and its record of calls for the guard.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

import array
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.c10d_operators import OPERATIONS, reduction_kind
from lightning_lockstep.distributed.failure.record import own_place
from lightning_lockstep.distributed.guard.collective_call import (
    CollectiveCall,
    batch_of_call,
    call_site,
    call_title,
    fingerprint,
    mismatch_report,
)
from lightning_lockstep.distributed.guard.records import Arrival, Outstanding, RecordedCall
from lightning_lockstep.distributed.mpi.operations import COLLECTIVES, Receive, moved, pieces
from lightning_lockstep.distributed.mpi.runtime import MPIRuntime
from lightning_lockstep.distributed.mpi.worker import Body, MPIWork
from lightning_lockstep.errors import CollectiveMismatchError, RankFailedError

# A rank that has exited may still take part for so long through what it has sent before [s].
_IN_FLIGHT = 5.0
_RECORDED = 512  # calls of a group


class CallRecords:
    """The last collectives of one group; a ``CallRecorder`` of the guard."""

    # Torch's own flight recorder sees no process group that is written in Python.

    def __init__(self) -> None:
        self._calls: deque[tuple[CollectiveCall, float]] = deque(maxlen=_RECORDED)
        self._open: dict[int, CollectiveCall] = {}  # by number, in the order of the calls

    def begin(self, call: CollectiveCall) -> None:
        """Note that a collective was called."""
        self._calls.append((call, time.time()))
        self._open[call.number] = call

    def end(self, number: int) -> None:
        """Note that a collective is complete, or has failed."""
        self._open.pop(number, None)

    @property
    def is_recording(self) -> bool:
        return bool(self._calls)

    def outstanding(self) -> Sequence[Outstanding]:
        return [Outstanding(call.group, call.number) for call in tuple(self._open.values())[:1]]

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        return [
            RecordedCall(call=call, started=started, done=call.number not in self._open)
            for call, started in self._calls.copy()
        ]

    def arrivals(self, since: float) -> Sequence[Arrival]:
        return [Arrival(c.group, c.number, started) for c, started in self._calls.copy() if started >= since]


class MPIProcessGroup(dist.ProcessGroup):
    """A group of ranks as two MPI communicators: one for collectives, one for sends and receives."""

    compares_calls = True  # before each collective, so that the guard need not
    supports_coalescing = False  # torch then waits for several operations by itself
    _device_types = [torch.device("cpu")]  # noqa: RUF012 - a property of torch's class

    def __init__(
        self,
        rank: int,
        size: int,
        runtime: MPIRuntime,
        comm: Any,
        messages: Any,
        *,
        title: str,  # in messages
        ranks: Sequence[int],  # by their numbers in the default group
        timeout: timedelta,
    ) -> None:
        # Torch 2.13 takes no store here from a subclass in Python.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.comm, self._messages, self._runtime = comm, messages, runtime
        self._size, self._name = size, title
        self._title, self._ranks = title, ranks
        self._in_world = runtime.worker.call(runtime.ranks_of, comm)
        self.options = SimpleNamespace(_timeout=timeout)  # as backends in C++ have it
        self.call_recorder = CallRecords()
        self._broken: BaseException | None = None
        self._count, self._lane = 0, deque[MPIWork]()
        self._lock = threading.Lock()  # threads give the worker their calls in the order of the numbers

    # -- collectives -------------------------------------------------------------------------------------

    def _collective(self, name: str, *given: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Start a collective: torch's methods of :data:`COLLECTIVES` are this one."""
        if given and not isinstance(given[-1], (Tensor, list, tuple)):
            *given, opts = given  # type: ignore[assignment]
        tensors, sizes = given[:2], given[2:]
        flat, outputs, inputs = _flat(tensors), _flat(tensors[:1]), _flat(tensors[-1:])
        _check(flat)
        copies: list[tuple[Tensor, Tensor]] = []
        contiguous = [_contiguous(one, [] if i else copies) for i, one in enumerate(tensors)]
        body = COLLECTIVES[name](self, *contiguous, *sizes, opts)
        # What is equal on all ranks: of a gather with a shape for each rank, the list.
        by_rank = name == "allgather" and len({tensor.shape for tensor in outputs}) > 1
        shown = outputs if by_rank or name == "scatter" else [] if name.startswith("alltoall") else inputs
        op = reduction_kind(getattr(opts, "reduceOp", dist.ReduceOp.SUM)) if "reduce" in name else None
        call = CollectiveCall(
            operation=OPERATIONS[name if name == "barrier" else f"{name}_"],
            group=self._title,
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in flat[:1]),
            shapes=tuple(tuple(tensor.shape) for tensor in shown),
            reduce_op=op,
            root=self._ranks[opts.rootRank] if hasattr(opts, "rootRank") else None,
            site=call_site(),
            batch=batch_of_call(),
        )
        with self._lock:
            self._count += 1
            call = replace(call, number=self._count)
            self.call_recorder.begin(call)
            return self._submitted(
                f"{call_title(call.operation, call.reduce_op, call.root)} #{call.number}",
                self._agreed(call, inputs[:1], _copied_back(body, copies)),
                outputs,
                self._lane,
                timeout or getattr(opts, "timeout", None),
                lambda work: self._ended(work, call.number),
                range(self._size),
            )

    def _agreed(self, call: CollectiveCall, inputs: Sequence[Tensor], body: Body) -> Body:
        """Carry a collective out if all ranks have called the same, and raise on all of them if not."""
        # MPI does not ask: it would truncate on one rank, give wrong numbers on another, or write where it must not.
        if isinstance(self._broken, RankFailedError):
            raise self._broken
        if self._broken is not None:
            raise dist.DistBackendError(
                f"Group {self._title!r} of the backend 'mpi4py' cannot be used any more, because an earlier operation"
                f" failed: {self._broken}"
            )
        if self._size > 1:
            number = fingerprint((*call.compared(), call.batch))
            memory = array.array("q", [number, -number])
            yield [self.comm.Iallreduce(MPI.IN_PLACE, [memory, 2, MPI.INT64_T], MPI.MAX).Test]
            if memory[0] != -memory[1]:
                own = replace(call, where=own_place(batches=True)).to_data()
                calls = [CollectiveCall.from_data(data) for data in self.comm.allgather(own)]
                raise CollectiveMismatchError(mismatch_report(dict(zip(self._ranks, calls, strict=True))))
        yield from body

    def _ended(self, work: MPIWork, number: int) -> None:
        self.call_recorder.end(number)
        self._named(work)
        # After a comparison all ranks have come equally far; otherwise nobody knows how far the others are.
        if work.given_up or not isinstance(work.error, CollectiveMismatchError):
            self._broken = self._broken or work.error

    # -- sends and receives ------------------------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        return self._message(f"send to {to}", tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._message(f"receive from {source}", tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from whichever rank sends one first."""
        return self._message("receive from any rank", tensors, MPI.ANY_SOURCE, tag)

    def _message(self, title: str, tensors: Any, other: int, tag: int) -> MPIWork:
        _check(tensors)
        copies: list[tuple[Tensor, Tensor]] = []
        (tensor,) = _contiguous(tensors, copies)
        senders: list[int] = []

        def send() -> Body:
            yield [self._messages.Isend(moved(piece), other, tag).Test for piece in pieces(tensor)]

        def receive() -> Body:
            first, *more = pieces(tensor)
            message = Receive(self._messages, first, other, tag)
            yield [message]
            senders.append(message.status.Get_source())
            yield [Receive(self._messages, piece, senders[0], tag) for piece in more]

        body = send() if title.startswith("send") else _copied_back(receive(), copies)
        others = range(self._size) if other == MPI.ANY_SOURCE else [other]
        work = self._submitted(title, body, tensors, deque(), None, self._named, others)
        work.senders = senders
        return work

    # -- both --------------------------------------------------------------------------------------------

    def _submitted(
        self,
        title: str,
        body: Body,
        outputs: list[Tensor],
        lane: deque[MPIWork],
        timeout: timedelta | None,
        ended: Callable[[MPIWork], None],
        others: Sequence[int],  # the ranks that it needs
    ) -> MPIWork:
        work = MPIWork(
            f"{title} of group {self._title!r}",
            body,
            outputs,
            lane=lane,
            timeout=max((timeout or timedelta(0)).total_seconds(), 0.0)
            or self.options._timeout.total_seconds(),
            ended=ended,
            exited=lambda: self._exited(others),
        )
        self._runtime.worker.submit(work)
        return work

    def _exited(self, others: Sequence[int]) -> str:
        """Return which of these ranks have exited, if one has for so long that nothing of it is on its way."""
        if not self._runtime.exited:
            return ""
        since = {rank: self._runtime.exited.get(self._in_world[rank]) for rank in others}
        gone = {rank: moment for rank, moment in since.items() if moment is not None}
        is_late = bool(gone) and time.monotonic() - min(gone.values()) > _IN_FLIGHT
        return ranks_in_words(self._ranks[rank] for rank in gone) if is_late else ""

    def _named(self, work: MPIWork) -> None:
        if isinstance(work.error, MPI.Exception):
            text = f"MPI reported an error in {work.title}: {work.error}."
            if work.error.Get_error_class() == MPI.ERR_TRUNCATE:
                text += " A rank has sent more than this one expects: make both ends equal."
            work.error = dist.DistBackendError(text)

    # -- the rest of torch's contract --------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "mpi4py"

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation waits for other ranks."""
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Abort the group: operations that come fail."""
        self._broken = self._broken or dist.DistBackendError("the group was aborted")

    def shutdown(self) -> None:
        """Give the communicators back to MPI, unless something went wrong on them."""
        if self._broken is None and not MPI.Is_finalized():
            self._broken = dist.DistBackendError("the group was destroyed")
            for comm in (self._messages, self.comm):
                self._runtime.worker.call(comm.Free)


# Torch 2.13 has other names for some.
_NEWER = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
for _name in COLLECTIVES:
    for _method in {_name, _NEWER.get(_name, _name)}:
        setattr(MPIProcessGroup, _method, partialmethod(MPIProcessGroup._collective, _name))


# -- The tensors of a caller --


def _flat(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else [tensor for one in given for tensor in _flat(one)]


def _check(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"The backend 'mpi4py' cannot send a {tensor.layout} tensor: call to_dense() first, or give Embedding"
                " sparse=False."
            )
        if not tensor.is_cpu:
            raise ValueError(
                f"The backend 'mpi4py' cannot send a tensor on device {tensor.device}: expected cpu."
            )
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"Tensors of {tensors[0].dtype} and {tensor.dtype} were given: expected one dtype."
            )


def _contiguous(given: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """Return the tensors in the lists, contiguous; of those that were copied, note which is a copy of which."""
    if not isinstance(given, Tensor):
        return [_contiguous(one, copies) for one in given]
    if given.is_contiguous():
        return given
    copies.append((given, given.detach().contiguous()))
    return copies[-1][1]


def _copied_back(body: Body, copies: Sequence[tuple[Tensor, Tensor]]) -> Body:
    yield from body
    for tensor, contiguous in copies:
        tensor.copy_(contiguous)
