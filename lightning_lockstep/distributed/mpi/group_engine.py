"""Runs the operations of one group, on tensors in memory that MPI can use."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from lightning_lockstep.distributed.guard.collective_call import (
    CollectiveCall,
    batch_of_call,
    call_site,
    call_title,
)
from lightning_lockstep.distributed.mpi.operations import LIMITS, Collective
from lightning_lockstep.distributed.mpi.progress import AllWork, Body, FinishedWork, MPIWork, Task, run_here
from lightning_lockstep.distributed.mpi.rank_check import CallRecords, Peers, RankCheck, may_all_block
from lightning_lockstep.distributed.mpi.runtime import MPIRuntime
from lightning_lockstep.errors import CollectiveMismatchError

# -- From the tensors of a caller to memory that MPI can use, and back --
# Contiguous tensors on the CPU are used as they are. Others are copied: strided ones into a contiguous one,
# CUDA ones into pinned host memory on a separate stream, so that the caller's stream never waits for
# MPI. Where the MPI library takes CUDA memory, contiguous CUDA tensors are used as they are, too.

_HALF = (torch.float16, torch.bfloat16)
_streams: dict[torch.device, Any] = {}


def staged(
    tensors: Sequence[Tensor],
    written: Sequence[bool],
    make: Callable[[list[Tensor]], Body],
    *,
    cuda_aware: bool,
) -> tuple[Body, Callable[[], None] | None]:
    """Return the operation with copies before and after it, and what a waiter must do at the end."""
    cuda = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if cuda is not None:
        return _on_cuda(cuda, tensors, written, make, cuda_aware)
    if all(tensor.is_contiguous() for tensor in tensors):
        return make([tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]), None
    return _strided(tensors, written, make), None


def _strided(
    tensors: Sequence[Tensor], written: Sequence[bool], make: Callable[[list[Tensor]], Body]
) -> Body:
    hosts = [tensor.detach().contiguous() for tensor in tensors]
    yield from make(hosts)
    for tensor, host, write in zip(tensors, hosts, written, strict=True):
        if write and host.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(host)


class _Reached:
    """A CUDA event that is waited for as MPI requests are."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def Test(self) -> bool:  # noqa: N802 - the name MPI requests have
        return bool(self._event.query())


def _on_cuda(
    device: torch.device,
    tensors: Sequence[Tensor],
    written: Sequence[bool],
    make: Callable[[list[Tensor]], Body],
    cuda_aware: bool,
) -> tuple[Body, Callable[[], None]]:
    written_before = torch.cuda.Event()  # type: ignore[no-untyped-call]
    written_before.record(torch.cuda.current_stream(device))
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    stream = _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def body() -> Body:
        direct = cuda_aware and all(t.is_contiguous() and t.dtype not in _HALF for t in tensors)
        if direct:
            yield [_Reached(written_before)]
            yield from make([tensor.detach() for tensor in tensors])
            done.record(stream)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(written_before)
            hosts = [_to_host(tensor, stream) for tensor in tensors]
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        yield [_Reached(copied)]
        yield from make(hosts)
        with torch.cuda.stream(stream):
            for tensor, host, write in zip(tensors, hosts, written, strict=True):
                if write:
                    tensor.detach().copy_(host, non_blocking=True)
            done.record(stream)
        yield [_Reached(done)]  # the pinned memory must outlive the copy

    return body(), lambda: torch.cuda.current_stream(device).wait_event(done)


def _to_host(tensor: Tensor, stream: Any) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    tensor.record_stream(stream)
    return host


# -- Runs the operations of one group of the backend ``mpi4py``: in the calling or in the progress thread
# This module is imported once MPI is up, never before.

_DONE = FinishedWork()
#: Makes an operation of tensors that MPI may use.
Make = Callable[[list[Tensor]], Body]


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    name: str  # in messages
    ranks: Sequence[int]  # by their numbers in the default group
    timeout: float  # longest wait for other ranks [s]
    check: bool  # compare the ranks before each operation
    cuda_aware: bool  # MPI takes CUDA memory


class Call(NamedTuple):
    """One collective as the caller meant it."""

    operation: str  # in torch.distributed
    tensors: Sequence[Tensor]  # all that MPI is given, of one dtype
    reads: int  # how many of them, the first ones, are only read
    shown: Sequence[Tensor]  # whose shapes a message shows, of the same dtype
    result: Any  # of its future
    nbytes: int = 0  # of its largest MPI collective, the same on every rank; 0: made of messages
    reduce_op: str | None = None
    root: int | None = None  # in the group
    compared: Sequence[Tensor] | None = None  # whose shapes are equal on all ranks; None: the shown ones
    pairwise: bool = False  # what each rank sends must be as large as what the receiver expects
    note: str = ""  # shown instead of the shapes, compared too: what is wrong with the arguments, say

    def signature(self) -> Hashable:
        """Return what must be equal on all ranks."""
        dtype = self.shown[0].dtype if self.shown else None
        shapes = [tensor.shape for tensor in (self.shown if self.compared is None else self.compared)]
        return self.operation, self.reduce_op, self.root, dtype, self.note, *shapes


class GroupEngine:
    """Runs the operations of one group, compared between the ranks or not."""

    def __init__(self, store: Any, runtime: MPIRuntime, comm: Any, settings: GroupSettings) -> None:
        self.runtime, self.comm, self.settings = runtime, comm, settings
        self.timeout = settings.timeout
        self.check = RankCheck(comm, settings.ranks) if settings.check else None
        self.broken: BaseException | None = None
        self.peers = Peers(store, runtime, comm, group=settings.name, ranks=settings.ranks)
        self.records = CallRecords(settings.name)
        self._started, self._queued = 0, 0
        self._coalesced: list[MPIWork] | None = None
        # Held while a caller itself carries an operation out, since a callback may call one meanwhile.
        self._lock = threading.RLock()

    def run(
        self,
        call: Call,
        make: Make,
        options: Any,  # torch's: timeout, and whether the caller waits at once
        *,
        small: bool = False,  # worth the caller's own time where it waits anyway
    ) -> Any:
        """Run a collective and return its handle."""
        if self.broken is not None:
            raise self._unusable()
        timeout = _seconds(options) or self.timeout
        waits = not getattr(options, "asyncOp", True) and self._coalesced is None
        with self._lock:
            if self.broken is not None:  # by the operation that held the lock
                raise self._unusable()
            self._started += 1
            number = self._started
            here = small and waits and not self._queued and self.runtime.anywhere
            if not here:
                self._queued += 1
            written = [i >= call.reads for i in range(len(call.tensors))]
            inner, finish = staged(call.tensors, written, make, cuda_aware=self.settings.cuda_aware)
            site = "" if here or self.check is None else call_site()
            self.records.begin(number, call.operation, call.shown, call.reduce_op, self._root(call), site)
            task = Task(
                self._compared(call, number, site, batch_of_call(), inner, here),
                timeout=timeout,
                timed_out=lambda seconds: self._timed_out(self._title(call), number, seconds),
                lane=self,
                cannot_complete=self.peers.any_exited,
            )
            if here:
                try:
                    run_here(task)
                except BaseException as error:
                    raise self._failed(error, call.operation) from error.__cause__
                return _DONE
            work = MPIWork(task, call.result, finish)
            self.runtime.thread.submit(task)
        if waits:
            work.wait()
        elif self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def start_coalescing(self) -> None:
        """Let operations be started one by one and waited for together."""
        self._coalesced = []

    def end_coalescing(self) -> AllWork:
        """Return one handle for everything started since :meth:`start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        return AllWork(works)

    def message(self, title: str, tensor: Tensor, make: Make, *, written: bool) -> MPIWork:
        """Start to send or receive and return its handle."""
        if self.broken is not None:
            raise self._unusable()
        inner, finish = staged([tensor], [written], make, cuda_aware=self.settings.cuda_aware)
        task = Task(
            self._with_torch_errors(inner, title),
            timeout=self.timeout,
            timed_out=lambda seconds: self._timed_out(title, None, seconds),
            cannot_complete=self.peers.any_exited,
        )
        work = MPIWork(task, [tensor], finish)
        if self.runtime.anywhere and not tensor.is_cuda and task.step_some(20):
            work.complete()
        else:
            self.runtime.thread.submit(task)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def refuse(self, operation: str, error: Exception) -> Exception:
        """Return the error for arguments that cannot be used, once the other ranks know of it."""
        if self.check is not None and self.broken is None:
            call = Call(operation, [], 0, [], [], note=f"{type(error).__name__}: {error}")
            self.run(call, lambda _: iter(()), None).wait()  # type: ignore[arg-type,return-value]
        return error

    def abort(self) -> None:
        """Let every operation that comes fail."""
        self.broken = self.broken or dist.DistBackendError("the group was aborted")

    def free(self, communicators: Sequence[Any]) -> None:
        """Give communicators back to MPI, unless something went wrong on them."""
        if self.broken is None and not self.runtime.MPI.Is_finalized():
            self.broken = dist.DistBackendError("the group was destroyed")
            for comm in communicators:
                self.runtime.call(comm.Free)

    def _compared(self, call: Call, number: int, site: str, batch: str, inner: Body, here: bool) -> Body:
        # What must be the same on all ranks: whether they carry out MPI's collectives blocking or polled.
        large = call.nbytes > LIMITS.polled
        owner = object()
        together = False

        def describe() -> CollectiveCall:
            return replace(self._described(call, number, site or call_site()), batch=batch)

        try:
            busy = here or not large or not self.runtime.may_block(owner)
            if self.check is not None:
                together = yield from self.check.agree(call.signature(), describe, batch=batch, busy=busy)
                if call.pairwise:
                    inputs, outputs = call.tensors[: call.reads], call.tensors[call.reads :]
                    yield from self.check.agree_on_sizes(inputs, outputs, describe)
            elif large and self.comm.size > 1:
                together = yield from may_all_block(self.comm, busy=busy)
            for wanted in inner:
                if not isinstance(wanted, Collective):
                    yield wanted
                elif together:
                    wanted.block()
                else:
                    yield [wanted.start()]
        except BaseException as error:
            raise self._failed(error, call.operation) from error.__cause__
        finally:
            self.runtime.blocks_no_more(owner)
            self.records.end(number)
            if not here:
                with self._lock:
                    self._queued -= 1

    def _with_torch_errors(self, inner: Body, title: str) -> Body:
        try:
            yield from inner
        except MPI.Exception as error:
            raise self._failed(error, title) from error

    def _described(self, call: Call, number: int, site: str) -> CollectiveCall:
        return CollectiveCall(
            operation=call.operation,
            group=self.settings.name,
            number=number,
            dtypes=tuple(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in call.shown)),
            shapes=tuple(tuple(tensor.shape) for tensor in call.shown),
            reduce_op=call.reduce_op,
            root=self._root(call),
            site=site,
            note=call.note,
        )

    def _root(self, call: Call) -> int | None:
        return None if call.root is None else self.settings.ranks[call.root]

    def _title(self, call: Call) -> str:
        return call_title(call.operation, call.reduce_op, self._root(call))

    def _failed(self, error: BaseException, title: str) -> BaseException:
        """Return the error to raise; unless the ranks merely disagreed, the group cannot be used any more."""
        if isinstance(error, MPI.Exception):
            error = dist.DistBackendError(f"MPI reported an error in {title}: {error}")
        if not isinstance(error, (CollectiveMismatchError, GeneratorExit)) and self.broken is None:
            self.broken = error
        return error

    def _unusable(self) -> BaseException:
        return dist.DistBackendError(
            f"Group {self.settings.name!r} of the backend 'mpi4py' cannot be used any more, since an earlier"
            f" operation failed: {self.broken}"
        )

    def _timed_out(self, title: str, number: int | None, seconds: float) -> BaseException:
        error = self.peers.error(title, number, seconds)
        if number is not None:
            self.broken = error
        return error


Prepared = tuple[Call, Make, Any, bool]


class GroupPart:
    """What the parts of the process group share."""

    engine: GroupEngine
    _comm: Any
    _rank: int
    _size: int


def collective(operation: str) -> Callable[[Callable[..., Prepared]], Callable[..., Any]]:
    """Make a collective of a method that looks at its arguments and returns what to do."""
    # What the method raises over its arguments is raised on every rank.

    def decorate(prepare: Callable[..., Prepared]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def method(self: GroupPart, *args: Any, **options: Any) -> Any:
            try:
                call, make, opts, small = prepare(self, *args, **options)
            except (TypeError, ValueError) as error:
                raise self.engine.refuse(operation, error) from None
            return self.engine.run(call, make, opts, small=small)

        return method

    return decorate


def is_small(tensor: Tensor) -> bool:
    """Return whether the caller steps an operation on this tensor itself, where it waits anyway."""
    return tensor.nbytes <= LIMITS.polled and not tensor.is_cuda


def _seconds(options: Any) -> float:
    timeout = getattr(options, "timeout", None)
    return max(timeout.total_seconds(), 0.0) if isinstance(timeout, timedelta) else 0.0
