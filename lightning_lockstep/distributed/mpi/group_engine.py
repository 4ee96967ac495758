"""Runs the operations of one group of the backend ``mpi4py``: here or in the communication thread.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from lightning_lockstep.distributed.mpi.limits import LIMITS
from lightning_lockstep.distributed.mpi.operations import Collective
from lightning_lockstep.distributed.mpi.progress import Body, Task, run_here
from lightning_lockstep.distributed.mpi.rank_check import (
    Meaning,
    RankCheck,
    call_site,
    may_all_block,
    shapes_of,
)
from lightning_lockstep.distributed.mpi.runtime import MPIRuntime
from lightning_lockstep.distributed.mpi.staging import staged
from lightning_lockstep.distributed.mpi.work import (
    AllWork,
    FinishedWork,
    MPIWork,
    gone_error,
    stall_error,
)
from lightning_lockstep.errors import CollectiveMismatchError

__all__ = ["Call", "GroupEngine", "GroupSettings"]

_DONE = FinishedWork()
Make = Callable[[list[Tensor]], Body]


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Settings of one group.

    Attributes:
        name: Its name.
        timeout: Longest wait for other ranks [s].
        check: Whether ranks are compared before each operation.
        cuda_aware: Whether MPI takes CUDA memory.
    """

    name: str
    timeout: float
    check: bool
    cuda_aware: bool


class Call(NamedTuple):
    """One operation as the caller meant it.

    Attributes:
        name: What it is called in messages.
        signature: What must be equal on all ranks.
        tensors: All tensors; those before ``reads`` are only read.
        reads: How many are only read.
        shown: Tensors whose shapes a message shows.
        result: What its future gives.
        nbytes: Size of its largest MPI collective, the same number on every rank; 0 when it is made of messages.
    """

    name: str
    signature: Hashable
    tensors: Sequence[Tensor]
    reads: int
    shown: Sequence[Tensor]
    result: Any
    nbytes: int = 0


class GroupEngine:
    """Runs the operations of one group: here or in the communication thread, compared or not.

    Args:
        store: Store of the group, for what a rank says when it waited in vain.
        runtime: MPI of this process.
        comm: Communicator of the group's collectives.
        settings: Settings of the group.
    """

    def __init__(self, store: Any, runtime: MPIRuntime, comm: Any, settings: GroupSettings) -> None:
        self.store, self.runtime, self.comm, self.settings = store, runtime, comm, settings
        self.rank, self.size = comm.rank, comm.size
        self.members = runtime.numbers_of(comm)
        self.timeout = settings.timeout
        self.check = RankCheck(comm, settings.name) if settings.check else None
        self.broken: BaseException | None = None
        self.number = 0
        self.collected: list[MPIWork] | None = None
        self.queued = 0
        self.lock = threading.Lock()

    def run(self, call: Call, make: Make, options: Any, *, small: bool = False) -> Any:
        """Run a collective and return its handle.

        Args:
            call: What the caller meant.
            make: Makes the operation from the tensors that MPI may use.
            options: Torch's options: timeout, and whether the caller will wait at once.
            small: Whether it is worth the caller's own time where the caller waits anyway.

        Ranks: all of the group.
        """
        if self.broken is not None:
            raise self.unusable()
        timeout = _seconds(options) or self.timeout
        waits = not getattr(options, "asyncOp", True)
        with self.lock:
            self.number += 1
            number = self.number
            here = small and waits and not self.queued and self.runtime.anywhere and self.collected is None
            if not here:
                self.queued += 1
        written = [i >= call.reads for i in range(len(call.tensors))]
        inner, finish = staged(call.tensors, written, make, cuda_aware=self.settings.cuda_aware)
        site = "" if here or self.check is None else call_site()
        body = self._compared(call, number, site, inner, here)
        stalled = self.stall(call.name, number)
        task = Task(body, timeout=timeout, stalled=stalled, lane=self, hopeless=self.hopeless)
        if here:
            try:
                run_here(task, timeout)
            except BaseException as error:
                raise self.failed(error, call.name) from error.__cause__
            return _DONE
        work = MPIWork(task, call.result, timeout, finish)
        self.runtime.engine.submit(task)
        if waits and self.collected is None:
            work.wait()
        elif self.collected is not None:
            self.collected.append(work)
        return work

    def all_collected(self) -> Any:
        """Return one handle for everything started since ``collected`` was set.

        Ranks: as the operations.
        """
        works, self.collected = self.collected or [], None
        return AllWork(works)

    def give_up(self) -> None:
        """Let every operation that waits or comes fail.

        Ranks: any rank, alone.
        """
        self.broken = self.broken or dist.DistBackendError("the group was aborted")

    def free(self, communicators: Sequence[Any]) -> None:
        """Give communicators back to MPI, unless something went wrong on them.

        Ranks: every rank of the group.
        """
        if self.broken is None and not self.runtime.MPI.Is_finalized():
            self.broken = dist.DistBackendError("the group was destroyed")
            for comm in communicators:
                self.runtime.call(comm.Free)

    def message(self, name: str, tensor: Tensor, make: Make, *, written: bool) -> MPIWork:
        """Start to send or receive and return its handle.

        Ranks: this one; the peer does its part when it likes.
        """
        if self.broken is not None:
            raise self.unusable()
        inner, finish = staged([tensor], [written], make, cuda_aware=self.settings.cuda_aware)
        stalled = self.stall(name, None)
        task = Task(self._mapped(inner, name), timeout=self.timeout, stalled=stalled, hopeless=self.hopeless)
        work = MPIWork(task, [tensor], self.timeout, finish)
        if self.runtime.anywhere and not tensor.is_cuda:
            for _ in range(20):
                try:
                    over = task.step()
                except BaseException as error:  # belongs to whoever waits for the message
                    task.fail(error)
                    over = True
                if over:
                    work._over()
                    return work
        self.runtime.engine.submit(task)
        return work

    def refuse(self, name: str, error: Exception) -> Exception:
        """Return the error for arguments that cannot be used, once the other ranks know of it.

        Ranks: all of the group; those whose arguments are right raise too.
        """
        if self.check is not None and self.broken is None:
            call = Call(name, ("fault", name, str(error)), [], 0, [], [])
            meaning = Meaning(name, "", f"{type(error).__name__}: {error}", call_site())
            with self.lock:
                self.number += 1
                self.queued += 1
            body = self._compared(call, self.number, "", iter(()), False, meaning)  # type: ignore[arg-type]
            stalled = self.stall(name, self.number)
            task = Task(body, timeout=self.timeout, stalled=stalled, lane=self, hopeless=self.hopeless)
            work = MPIWork(task, [], self.timeout)
            self.runtime.engine.submit(task)
            work.wait()
        return error

    def _compared(
        self, call: Call, number: int, site: str, inner: Body, here: bool, meaning: Meaning | None = None
    ) -> Body:
        # What the ranks must know alike: whether they carry out MPI's collectives blocking or polled.
        large = call.nbytes > LIMITS.polled
        owner = object()
        together = False
        try:
            busy = here or not large or not self.runtime.may_block(owner)
            if self.check is not None:

                def describe() -> Meaning:
                    dtypes = ", ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in call.shown))
                    return meaning or Meaning(call.name, dtypes, shapes_of(call.shown), site or call_site())

                together = yield from self.check.agree(call.signature, number, describe, busy=busy)
            elif large and self.size > 1:
                together = yield from may_all_block(self.comm, busy=busy)
            for wanted in inner:
                if not isinstance(wanted, Collective):
                    yield wanted
                elif together:
                    wanted.block()
                else:
                    yield [wanted.start()]
        except BaseException as error:
            raise self.failed(error, call.name) from error.__cause__
        finally:
            self.runtime.blocks_no_more(owner)
            if not here:
                with self.lock:
                    self.queued -= 1

    def _mapped(self, inner: Body, name: str) -> Body:
        try:
            yield from inner
        except MPI.Exception as error:
            raise self.failed(error, name) from error

    def failed(self, error: BaseException, name: str) -> BaseException:
        """Return the error to raise, and remember that the group cannot be used any more unless it still can.

        Ranks: any rank, alone.
        """
        if isinstance(error, MPI.Exception):
            error = dist.DistBackendError(f"MPI reported an error in {name}: {error}")
        if not isinstance(error, (CollectiveMismatchError, GeneratorExit)) and self.broken is None:
            self.broken = error
        return error

    def unusable(self) -> BaseException:
        """Return the error for an operation after one that failed."""
        return dist.DistBackendError(
            f"Group {self.settings.name!r} of the backend 'mpi4py' cannot be used any more, since an"
            f" earlier operation"
            f" failed: {self.broken}"
        )

    def hopeless(self) -> bool:
        """Return whether a rank of the group has ended its program some time ago."""
        return bool(self.runtime.gone) and any(self.runtime.gone_for(r) > _LAST_WORDS for r in self.members)

    def stall(self, name: str, number: int | None) -> Callable[[float], BaseException]:
        """Return what makes the error for when other ranks don't come.

        Args:
            name: What the operation is called.
            number: Which collective of the group it is; ``None`` for a message.

        Ranks: any rank, alone.
        """

        def stalled(seconds: float) -> BaseException:
            gone = [i for i, rank in enumerate(self.members) if rank in self.runtime.gone]
            if gone:
                error = gone_error(name, self.settings.name, gone)
            else:
                missing = "the other end did not answer" if number is None else self._missing(number)
                error = stall_error(name, self.settings.name, seconds or self.timeout, missing)
            if number is not None:
                self.broken = error
            return error

        return stalled

    def _missing(self, number: int) -> str:
        """Ask the store which ranks wait for this operation too; those that don't, have not come."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        with suppress(dist.DistError):
            self.store.set(f"stalled/{number}/{self.rank}", b"1")
            time.sleep(0.5)
            others = [rank for rank in others if not self.store.check([f"stalled/{number}/{rank}"])]
        if not others:
            return f"all ranks have come to collective #{number}, but not at the same time"
        ranks = ", ".join(map(str, others))
        return f"rank {ranks} did not come to collective #{number}"


# How long a rank that has ended its program may still take part through what it has sent before [s].
_LAST_WORDS = 5.0


def _seconds(options: Any) -> float:
    timeout = getattr(options, "timeout", None)
    return max(timeout.total_seconds(), 0.0) if isinstance(timeout, timedelta) else 0.0
