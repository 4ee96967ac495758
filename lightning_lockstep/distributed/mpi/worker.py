"""The one thread of this process that talks to MPI, and the handle that torch gets of an operation.

    caller                            worker                                  callbacks of futures
    group.allreduce(...)
      Work(generator) -- inbox -->    first step: starts MPI's call
    goes on, or work.wait()           tests it, again and again, and meanwhile
                                      looks at: deadline, failure of another rank, ranks that have exited
                                      complete: next step, the next piece
                       <-- gate ---   no more steps: done
                                                       -------- gate ----->   future.set_result()

An operation is a generator. It starts non-blocking calls of MPI, yields the functions that test whether they are
complete, and goes on once they are. The worker never waits in MPI for a rank that has not arrived, so operations of
several groups, sends and receives go on side by side in whatever order they were called.

Collectives of one group run one after another, as MPI wants them in one order on all ranks. Only the worker calls MPI,
so any level of thread support will do that lets it.
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future

from lightning_lockstep.errors import CollectiveStallError

T = TypeVar("T")
#: Yields lists of functions, each of which returns once in its life that its request is complete.
Body = Generator[list[Callable[[], bool]], None, None]

_FUTURES = "lockstep-mpi-future"
# A waiter gives the worker, which ends an operation itself at its deadline, so much longer [s].
_EXTRA = 5.0
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
        lane: deque[MPIWork],  # operations of one lane run one after another
        timeout: float,  # longest wait for the other ranks [s]
        ended: Callable[[MPIWork], None],  # called in the worker when it is over
        exited: Callable[[], str],  # which of the ranks that it needs have exited
    ) -> None:
        super().__init__()
        self.title, self.lane = title, lane
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._ended, self._exited = ended, exited
        self.error: BaseException | None = None
        self.awaited = False  # by a thread that does nothing else meanwhile
        self.senders: list[int] = []  # of a receive, once it is complete
        self._body, self._tests, self._tensors = body, [], tensors
        # The worker writes into tensors of the caller, which may have been made in inference mode.
        self._in_inference = torch.is_inference_mode_enabled()
        self._done, self._gate = False, _thread.allocate_lock()
        self._gate.acquire()
        self._future: Future[Any] | None = None

    _tests: list[Callable[[], bool]]

    # -- in the worker ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Go on if MPI's calls are complete; return whether anything moved."""
        while self._tests:
            if not self._tests[-1]():
                return False
            self._tests.pop()
        with torch.inference_mode(self._in_inference):
            try:
                self._tests = next(self._body)
            except StopIteration:
                self.finish()
        return True

    @property
    def given_up(self) -> bool:
        """Whether it ended before MPI's calls were complete."""
        return bool(self._tests)

    def finish(self, error: BaseException | None = None) -> None:
        """Let those go on who wait for it."""
        self.error = error
        if self.given_up:  # MPI may still write to the memory, so all of it is kept
            _given_up.append(self)
        self._ended(self)
        self._done = True
        self._gate.release()

    def why_not(self) -> CollectiveStallError | None:
        """Return the error if there is no point in waiting any longer."""
        if exited := self._exited():
            return CollectiveStallError(
                f"{self.title} over MPI cannot complete: {exited} exited without calling it. Every rank must call the"
                " same collectives; look for a return, a sys.exit() or a loop that ends early there."
            )
        return self._stalled(self._timeout) if time.monotonic() > self._deadline else None

    def _stalled(self, seconds: float) -> CollectiveStallError:
        return CollectiveStallError(
            f"{self.title} timed out after {seconds:g} s over MPI: not every rank has called it. Every rank must call"
            " the same collectives in the same order; raise the timeout if a rank is only slow."
        )

    # -- anywhere ---------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is over."""
        self.awaited = True
        given = timeout.total_seconds() if timeout is not None else 0.0
        if not self._gate.acquire(timeout=given if given > 0 else self._timeout + _EXTRA):
            raise self._stalled(given if given > 0 else self._timeout)
        self._gate.release()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` would return at once."""
        return self._done

    def is_success(self) -> bool:
        """Return whether the operation is over and went well."""
        return self._done and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error the operation ended with, if any."""
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

            # A callback may start another operation and wait for it, which the worker could not.
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


_given_up: list[MPIWork] = []


# -- The worker --

_interruption: Callable[[], BaseException | None] | None = None


def set_interruption(question: Callable[[], BaseException | None] | None) -> None:
    """Let the worker ask, while it waits for another rank, for an error to end with, if there is one."""
    global _interruption
    _interruption = question


class Worker:
    """The thread that carries out operations, one step of each in turn."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._running: list[MPIWork] = []  # the first of each lane
        self.look: Callable[[], None] = lambda: None  # what else is called every 20 ms while one waits
        self._thread = threading.Thread(target=self._loop, name="lockstep-mpi", daemon=True)
        self._thread.start()

    def submit(self, work: MPIWork) -> None:
        self._inbox.put(work)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function`` in the worker and return what it returns."""
        box: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def called() -> None:
            try:
                box.put((function(*args), None))
            except BaseException as error:  # handed to the caller, whole
                box.put((None, error))

        self._inbox.put(called)
        value, error = box.get()
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End the thread, once nothing is queued before this call; waits 2 s at most."""
        self._inbox.put(None)
        self._thread.join(2.0)

    def _loop(self) -> None:
        torch.set_grad_enabled(False)  # for this thread
        tests, since, looked = 0, 0.0, 0.0
        while True:
            if not self._running or not self._inbox.empty():
                item = self._inbox.get()
                if item is None:
                    return
                if isinstance(item, MPIWork):
                    item.lane.append(item)
                    if item.lane[0] is item:
                        self._running.append(item)
                else:
                    item()
                tests = 0
            tests = 0 if self._step_all() else tests + 1
            if tests < _SPINS or (tests < _SPINS_IF_AWAITED and any(work.awaited for work in self._running)):
                since = time.monotonic()
                continue
            now = time.monotonic()
            if now - since > _YIELDS:
                time.sleep(0.00005 if now - since < 0.5 else 0.0005)
            else:
                os.sched_yield()
            if now - looked > _LOOKS:
                looked = now
                self._look()

    def _step_all(self) -> bool:
        moved = False
        for work in tuple(self._running):
            try:
                moved = work.step() or moved
            except BaseException as error:  # belongs to whoever waits for the operation
                work.finish(error)
            if work.is_completed():
                self._over(work)
        return moved

    def _look(self) -> None:
        self.look()
        interruption = _interruption() if _interruption is not None else None
        for work in tuple(self._running):
            error = interruption or work.why_not()
            if error is not None:
                work.finish(error)
                self._over(work)

    def _over(self, work: MPIWork) -> None:
        self._running.remove(work)
        work.lane.popleft()
        if work.lane:
            self._running.append(work.lane[0])


def wait_for_callbacks(seconds: float) -> bool:
    """Wait until all futures are complete and their callbacks have returned; return whether they are in time."""
    limit = time.monotonic() + seconds
    while under_way := [thread for thread in threading.enumerate() if thread.name == _FUTURES]:
        under_way[0].join(max(limit - time.monotonic(), 0.0))
        if time.monotonic() > limit:
            return False
    return True
