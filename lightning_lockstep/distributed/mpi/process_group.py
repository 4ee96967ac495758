"""The process group of the backend ``mpi4py``, and its record of calls for the guard.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

import array
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from lightning_lockstep.distributed.guard.collective_call import (
    CollectiveCall,
    batch_number,
    batch_of_call,
    call_site,
    fingerprint,
    mismatch,
)
from lightning_lockstep.distributed.guard.rank_state import Outstanding, RecordedCall
from lightning_lockstep.distributed.local_collectives import (
    OPERATIONS,
    answer,
    answered_locally,
    reduction_kind,
)
from lightning_lockstep.distributed.mpi.operations import (
    COLLECTIVES,
    Arguments,
    Receive,
    gathered,
    memory_of,
    need,
    pieces,
)
from lightning_lockstep.distributed.mpi.worker import Body, MPIWork, Worker
from lightning_lockstep.errors import CollectiveMismatchError, RankFailedError

_RECORDED = 512  # calls of a group


class MPIProcessGroup(dist.ProcessGroup):
    """A group of ranks as an MPI communicator."""

    supports_coalescing = False  # torch then waits for several operations by itself
    _device_types = [torch.device("cpu")]  # noqa: RUF012 - a property of torch's class

    def __init__(
        self,
        rank: int,
        size: int,
        worker: Worker,
        comm: Any,
        *,
        title: str,  # in messages
        ranks: Sequence[int],  # by their numbers in the default group
        timeout: timedelta,
    ) -> None:
        # Torch 2.13 takes no store here from a subclass in Python.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.comm, self._worker, self._name = comm, worker, title
        self._title, self._ranks = title, ranks
        self.options = SimpleNamespace(_timeout=timeout)  # as backends in C++ have it
        self._calls: deque[tuple[CollectiveCall, float]] = deque(maxlen=_RECORDED)
        self._broken: BaseException | None = None
        self._count = self._ended_calls = 0  # collectives that were called, and that are over
        self._last: MPIWork | None = None  # the collective that was called last, until it is over
        self._lock = threading.Lock()  # threads give the worker their calls in the order of the numbers

    # -- collectives --

    def _collective(self, name: str, *given: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Start a collective: torch's methods of :data:`COLLECTIVES` are this one."""
        if given and not isinstance(given[-1], (Tensor, list, tuple)):
            *given, opts = given  # type: ignore[assignment]
        tensors, sizes = given[:2], given[2:]
        if answered_locally():
            reduction, root = getattr(opts, "reduceOp", None), getattr(opts, "rootRank", 0)
            splits = sizes or (None, None)
            return answer(_operator(name), self, tensors, reduction=reduction, root=root, splits=splits)
        flat, outputs, inputs = _flat(tensors), _flat(tensors[:1]), _flat(tensors[-1:])
        _check(flat)
        copies: list[tuple[Tensor, Tensor]] = []
        contiguous = [_contiguous(one, [] if i else copies) for i, one in enumerate(tensors)]
        options = Arguments(
            reduction_kind(getattr(opts, "reduceOp", dist.ReduceOp.SUM)) if "reduce" in name else None,
            getattr(opts, "rootRank", None),
        )
        body = COLLECTIVES[name](self, *contiguous, *sizes, options)
        # What is equal on all ranks: of a gather with a shape for each rank, the list.
        by_rank = name == "allgather" and len({tensor.shape for tensor in outputs}) > 1
        shown = outputs if by_rank or name == "scatter" else [] if name.startswith("alltoall") else inputs
        described = CollectiveCall(
            operation=OPERATIONS[_operator(name)],
            group=self._title,
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in flat[:1]),
            shapes=tuple(tuple(tensor.shape) for tensor in shown),
            reduce_op=options.reduction,
            root=None if options.root is None else self._ranks[options.root],
            batch=batch_of_call(),
            site=call_site(),
        )
        number = fingerprint(described.compared()) ^ batch_number(described.batch)
        with self._lock:
            call = replace(described, number=self._count + 1)
            self._calls.append((call, time.time()))
            self._last = self._submitted(
                f"{call.title} #{call.number}",
                self._agreed(call, number, _copied_back(body, copies)),
                outputs,
                timeout or getattr(opts, "timeout", None),
                functools.partial(self._ended, call.number),
                self._last,
            )
            self._count = call.number
            return self._last

    def _agreed(self, call: CollectiveCall, number: int, body: Body) -> Body:
        """Carry a collective out if all ranks have called the same, and raise on all of them if not."""
        # MPI compares nothing: it would truncate on one rank, give wrong numbers on another, or write elsewhere.
        if isinstance(self._broken, RankFailedError):
            raise self._broken
        if self._broken is not None:
            raise dist.DistBackendError(
                f"Group {self._title!r} of the backend 'mpi4py' cannot be used any more, because an earlier operation"
                f" failed: {self._broken}"
            )
        if self.size() > 1:
            memory = array.array("q", [number, -number])
            yield [self.comm.Iallreduce(MPI.IN_PLACE, [memory, 2, MPI.INT64_T], MPI.MAX).Test]
            if memory[0] != -memory[1]:
                raise mismatch(self._ranks, (yield from gathered(self, call.to_bytes())))
        yield from body

    def _ended(self, number: int, work: MPIWork, error: BaseException | None) -> BaseException | None:
        self._ended_calls = number
        with self._lock:
            if self._last is work:
                self._last = None
        named = _named(work, error)
        # After a comparison all ranks have come equally far; otherwise nobody knows how far the others are.
        if work.given_up or not isinstance(named, CollectiveMismatchError):
            self._broken = self._broken or named
        return named

    # -- what the guard asks of a CallRecorder: torch's own sees no process group that is written in Python --

    def outstanding(self) -> Sequence[Outstanding]:
        # Collectives of a group end in the order of their calls.
        ended = self._ended_calls
        return [Outstanding(self._title, ended + 1)] if ended < self._count else []

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        ended = self._ended_calls
        return [
            RecordedCall(call=call, started=started, done=call.number <= ended) for call, started in self._calls.copy()
        ]

    # -- sends and receives --

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        return self._message(f"send to {to}", tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._message(f"receive from {source}", tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._message("receive from any rank", tensors, MPI.ANY_SOURCE, tag)

    def _message(self, title: str, tensors: Any, other: int, tag: int) -> Any:
        if answered_locally():
            return answer("send" if title.startswith("send") else "recv_", self, [tensors])  # which raises
        _check(tensors)
        copies: list[tuple[Tensor, Tensor]] = []
        (tensor,) = _contiguous(tensors, copies)
        senders: list[int] = []
        tag += 1  # that of messages inside collectives is 0

        def send() -> Body:
            yield [self.comm.Isend(memory_of(piece), other, tag).Test for piece in pieces(tensor)]

        def receive() -> Body:
            first, *more = pieces(tensor)
            message, source = Receive(self.comm, first, other, tag), other
            tests: list[Callable[[], bool]] = [message]
            if other == MPI.ANY_SOURCE:
                yield tests
                tests, source = [], message.status.source
            # Receives of one rank take its messages in the order in which they are started.
            tests += [Receive(self.comm, piece, source, tag) for piece in more]
            yield tests
            senders.append(message.status.source)

        body = send() if title.startswith("send") else _copied_back(receive(), copies)
        work = self._submitted(title, body, tensors, None, _named)
        work.senders = senders
        return work

    # -- both --

    def _submitted(
        self,
        title: str,
        body: Body,
        outputs: list[Tensor],
        timeout: timedelta | None,
        ended: Callable[[MPIWork, BaseException | None], BaseException | None],
        after: MPIWork | None = None,
    ) -> MPIWork:
        work = MPIWork(
            f"{title} of group {self._title!r}",
            body,
            outputs,
            timeout=max((timeout or timedelta(0)).total_seconds(), 0.0) or self.options._timeout.total_seconds(),
            after=after,
            ended=ended,
        )
        self._worker.submit(work)
        return work

    # -- the rest of torch's contract --

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "mpi4py"

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Abort the group: operations that come fail."""
        self._broken = self._broken or dist.DistBackendError("the group was aborted")

    def shutdown(self) -> None:
        """Give the communicator back to MPI, unless something went wrong on it."""
        if self._broken is None and not MPI.Is_finalized():
            self._broken = dist.DistBackendError("the group was destroyed")
            self._worker.call(self.comm.Free)


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
        setattr(MPIProcessGroup, _method, functools.partialmethod(MPIProcessGroup._collective, _name))


def _operator(name: str) -> str:
    return name if name == "barrier" else f"{name}_"


def _named(work: MPIWork, error: BaseException | None) -> BaseException | None:
    """Return the error of an operation as its caller gets it: one of MPI names the operation."""
    if not isinstance(error, MPI.Exception):
        return error
    text = f"MPI reported an error in {work.title}: {error}."
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        text += " A rank has sent more than this one expects: make the sizes at both ends equal."
    return dist.DistBackendError(text)


# -- The tensors of a caller --


def _flat(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else [tensor for one in given for tensor in _flat(one)]


def _check(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        dense, dtype = tensor.layout is torch.strided, tensors[0].dtype
        need(dense, f"{tensor.layout} was given: call to_dense() first, or give Embedding sparse=False")
        need(tensor.is_cpu, f"a tensor on device {tensor.device} was given, expected cpu")
        need(tensor.dtype == dtype, f"{dtype} and {tensor.dtype} were given, expected one dtype")


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
