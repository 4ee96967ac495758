"""The thread that carries out operations of MPI, and the handle that torch gets of an operation.

    caller                            worker                                  callbacks of futures
    group.allreduce(...)
      Work(generator) -- inbox -->    first step: starts MPI's call
    goes on, or work.wait()           tests it, again and again, and meanwhile
                                      looks at: deadline, failure of another rank
                                      complete: next step, the next piece
                       <-- gate ---   no more steps: done
                                                       -------- gate ----->   future.set_result()

An operation is a generator. It starts non-blocking calls of MPI, yields the functions that test whether they are
complete, and goes on once they are. The worker never waits in MPI for a rank that has not arrived, so operations of
several groups, sends and receives go on side by side in whatever order they were called.

Collectives of one group run one after another, because MPI wants them in one order on all ranks.
"""

from __future__ import annotations

import _thread
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_lockstep.errors import CollectiveStallError

T = TypeVar("T")
#: Yields lists of functions. Each tests whether its request is complete, and is not called again once it is.
Body = Iterator[list[Callable[[], bool]]]

_FUTURES = "lockstep-mpi-future"
_LOOKS = 0.02  # how often deadlines and failures are looked at [s]
# Tests before the core is given away: few while a backward may want it, many if a thread only waits.
_SPINS, _SPINS_IF_AWAITED = 5, 400
_YIELDS = 0.002  # time until the worker sleeps between tests [s]


class MPIWork(dist.Work):
    """The handle of an operation; the worker carries it out."""

    def __init__(
        self,
        title: str,  # in messages
        body: Body,
        tensors: list[Any],  # what its future gives
        *,
        timeout: float = math.inf,  # longest wait for the other ranks, once it has begun [s]
        after: MPIWork | None = None,  # the operation that has to be over before this one begins
        # Called in the worker when it is over, with its error, if any; returns the error that the caller gets.
        ended: Callable[[MPIWork, BaseException | None], BaseException | None] = lambda work, error: error,
    ) -> None:
        super().__init__()
        self.title = title
        self._timeout, self._after, self._ended = timeout, after, ended
        self._deadline: float | None = None  # set when it begins
        self.error: BaseException | None = None
        self.awaited = False  # by a thread that does nothing else meanwhile
        self.senders: list[int] = []  # of a receive, once it is complete
        self._body, self._tensors = body, tensors
        self._tests: list[Callable[[], bool]] = []
        # The worker writes into tensors of the caller, which may have been made in inference mode.
        self._in_inference = torch.is_inference_mode_enabled()
        self._done, self._gate = False, _thread.allocate_lock()
        self._gate.acquire()
        self._future: Future[Any] | None = None

    # -- in the worker --

    def step(self) -> bool:
        """Go on if MPI's calls are complete; return whether anything moved."""
        if self._deadline is None:
            if self._after is not None and not self._after.is_completed():
                return False
            self._after, self._deadline = None, time.monotonic() + self._timeout
        try:
            while self._tests:
                if not self._tests[-1]():
                    return False
                self._tests.pop()
            with torch.inference_mode() if self._in_inference else nullcontext():
                self._tests = next(self._body, _OVER)
        except BaseException as error:  # belongs to whoever waits for the operation
            self.finish(error)
        else:
            if self._tests is _OVER:
                self.finish()
        return True

    @property
    def given_up(self) -> bool:
        """Whether it ended before MPI's calls were complete."""
        return bool(self._tests)

    def finish(self, error: BaseException | None = None) -> None:
        """End the operation, and wake the threads that wait for it."""
        if self.given_up:  # MPI may still write to the memory, so all of it is kept
            _given_up.append(self)
        try:
            self.error = self._ended(self, error)
        except BaseException as failed:  # the worker goes on with the other operations
            self.error = failed
        self._done = True
        self._gate.release()

    def end_if_late(self, error: BaseException | None) -> None:
        """End with an error that ends all, or because the time is over."""
        if self._deadline is None:
            return  # the operation before it ends, and this one then says why it cannot begin
        if error is None and time.monotonic() > self._deadline:
            error = self._stalled(self._timeout)
        if error is not None:
            self.finish(error)

    def _stalled(self, seconds: float) -> CollectiveStallError:
        return CollectiveStallError(
            f"{self.title} timed out after {seconds:g} s over MPI: not every rank has called it. Every rank must call"
            " the same collectives in the same order; raise the timeout if a rank is only slow."
        )

    # -- anywhere --

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.awaited = True
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        # Without a limit of the caller: the worker ends it at its deadline.
        if not self._gate.acquire(timeout=seconds if seconds > 0 else -1):
            raise self._stalled(seconds)
        self._gate.release()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def source_rank(self) -> int:
        """Return the rank, in the group, that a message came from."""
        return self.senders[0] if self.senders else -1

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future that holds the tensors, or raises the operation's error, in C++ too."""
        if self._future is None:
            trigger: Future[Any] = Future()
            self._future = trigger.then(self._outcome)

            def complete() -> None:
                with self._gate:
                    pass
                trigger.set_result(None)

            # A callback may start another operation and wait for it, so the worker must not run it.
            if self._done:
                complete()
            else:
                try:
                    threading.Thread(target=complete, name=_FUTURES, daemon=True).start()
                except RuntimeError:  # Python is shutting down and starts no thread: this one waits
                    complete()
        return self._future

    def _outcome(self, _: Any) -> list[Any]:
        if self.error is not None:
            raise self.error
        return self._tensors


_OVER: list[Callable[[], bool]] = []
_given_up: list[MPIWork] = []


# -- The worker --


class Worker:
    """Carries out operations in its thread, one step of each in turn."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[MPIWork] = queue.SimpleQueue()
        # Called while the worker waits for another rank: the operations end with what it raises.
        self.check: Callable[[], None] = lambda: None
        threading.Thread(target=self._loop, name="lockstep-mpi", daemon=True).start()

    def submit(self, work: MPIWork) -> None:
        self._inbox.put(work)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function`` in the thread and return what it returns."""
        returned: list[T] = []

        def body() -> Body:
            returned.append(function(*args))
            yield []

        work = MPIWork("a call", body(), [])
        self.submit(work)
        work.wait()
        return returned[0]

    def _loop(self) -> None:
        torch.set_grad_enabled(False)  # for this thread
        running: list[MPIWork] = []
        tests, since, looked = 0, 0.0, 0.0
        while True:
            while not running or not self._inbox.empty():
                running.append(self._inbox.get())
                tests = 0
            moved = any([work.step() for work in running])  # noqa: C419 - each is to step
            tests = 0 if moved else tests + 1
            if moved:
                running = [work for work in running if not work.is_completed()]
            if tests < _SPINS or (tests < _SPINS_IF_AWAITED and any(work.awaited for work in running)):
                since = 0.0
                continue
            now = time.monotonic()
            since = since or now
            if now - since > _YIELDS:
                time.sleep(0.00005 if now - since < 0.5 else 0.0005)
            else:
                os.sched_yield()
            if now - looked > _LOOKS:
                looked = now
                error: BaseException | None = None
                try:
                    self.check()
                except BaseException as raised:  # a KeyboardInterrupt, if another rank was interrupted
                    error = raised
                for work in running:
                    work.end_if_late(error)
                running = [work for work in running if not work.is_completed()]


def wait_for_callbacks(seconds: float) -> None:
    """Wait until all futures are complete and their callbacks have returned, but at most this long."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        under_way = [thread for thread in threading.enumerate() if thread.name == _FUTURES]
        if not under_way:
            return
        under_way[0].join(max(limit - time.monotonic(), 0.0))
