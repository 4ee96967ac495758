"""The handles that operations of the backend ``mpi4py`` return."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_lockstep.distributed.mpi.progress import Task

__all__ = ["AllWork", "FinishedWork", "MPIWork"]


class MPIWork(dist.Work):
    """The handle of an operation that the progress thread carries out."""

    def __init__(
        self,
        task: Task,
        tensors: list[Tensor],  # what its future gives
        timeout: float,  # where the caller gives none [s]
        finish: Callable[[], None] | None = None,  # called by whoever waits, once it is over (CUDA streams)
    ) -> None:
        super().__init__()
        self._task, self._tensors, self._timeout, self._finish = task, tensors, timeout, finish
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self._guard = _thread.allocate_lock()
        self._future: Future[Any] | None = None
        self._trigger: Future[Any] | None = None
        self.senders: list[int] = []
        task.on_done = self.complete

    def complete(self) -> None:
        """Let those go on who wait for the operation; called once, when it is over."""
        with self._guard:
            trigger = self._trigger
            self._gate.release()
        if trigger is not None:
            trigger.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is over."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        given = seconds > 0
        if not self._gate.acquire(timeout=seconds if given else self._timeout + _EXTRA):
            raise self._task.timed_out(seconds if given else self._timeout)
        self._gate.release()
        if self._task.error is not None:
            raise self._task.error
        if self._finish is not None:
            self._finish()
        return True

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` would return at once."""
        return not self._gate.locked()

    def is_success(self) -> bool:
        """Return whether the operation is over and went well."""
        return self.is_completed() and self._task.error is None

    def exception(self) -> BaseException | None:
        """Return the error the operation ended with, if any."""
        return self._task.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors of a finished operation."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank, in the group, that a message from any source came from."""
        return self.senders[0] if self.senders else -1

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future that holds the tensors, or raises the operation's error, in C++ too."""
        with self._guard:
            if self._future is None:
                trigger: Future[Any] = Future()
                self._future = trigger.then(self._outcome)
                if self._gate.locked():
                    self._trigger = trigger
                else:
                    trigger.set_result(None)
            return self._future

    def _outcome(self, _: Any) -> list[Tensor]:
        if self._task.error is not None:
            raise self._task.error
        if self._finish is not None:
            self._finish()
        return self._tensors


# The progress thread ends a task itself at its limit; a waiter gives it this much longer [s].
_EXTRA = 5.0


class FinishedWork(dist.Work):
    """The handle of an operation that was over when the call returned."""

    def __init__(self, tensors: list[Tensor] | None = None) -> None:
        super().__init__()
        self._tensors = tensors or []

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> None:
        """Return ``None``."""

    def synchronize(self) -> None:
        """Do nothing."""

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Future[Any]:
        """Return a future that is done."""
        future: Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class AllWork(dist.Work):
    """The handle of several operations."""

    def __init__(self, works: list[MPIWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all; raises what the first that failed ended with."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Future[Any]:
        """Return a future that is done when all are."""
        return torch.futures.collect_all([work.get_future() for work in self._works])
