"""How an operation is stepped until it is done, and the handle that torch gets."""

from __future__ import annotations

import _thread
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

# -- How an operation of the ``mpi4py`` backend runs: a task that is stepped until it is done --
# An operation is a generator. It yields the MPI requests it waits for, and goes on when they are complete;
# it may also block in MPI where all ranks have arrived and have agreed to block. Whoever steps a task never
# blocks on a rank that has not arrived, so that a deadline, a failure elsewhere and other tasks are
# attended to.
#
# Small operations that a caller waits for are stepped by the caller itself. All others are stepped by the
# one progress thread: the collectives of a group one after another, everything else side by side.

#: Yields lists of requests (whatever has ``Test()``); returns nothing.
Body = Generator[Iterable[Any], None, None]

_interruption: Callable[[], BaseException | None] | None = None
_listener: Callable[[], None] | None = None
_abandoned: list[Any] = []


def set_interruption(question: Callable[[], BaseException | None] | None) -> None:
    """Let every wait for another rank ask, every 20 ms, for an error to end with, if there is one."""
    global _interruption
    _interruption = question


def set_listener(listener: Callable[[], None] | None) -> None:
    """Let every wait for another rank also call this, every 20 ms; it may use MPI. ``None`` ends that."""
    global _listener
    _listener = listener


class Pause:
    """What a waiting thread does between two tests: spin at first, then give the core away, then sleep."""

    __slots__ = ("_asked", "_since", "_spins", "_tests", "limit")

    def __init__(
        self,
        limit: float,  # moment at which waiting ends [s, of time.monotonic]
        spins: int = 100,  # tests before the core is given away; few where a backward may want it
    ) -> None:
        self.limit, self._tests, self._since, self._asked = limit, 0, 0.0, 0.0
        self._spins = spins

    def __call__(self) -> bool:
        """Pause; return ``False`` once the limit is reached."""
        self._tests += 1
        if self._tests < self._spins:
            return True
        now = time.monotonic()
        if self._tests == self._spins:
            self._since = self._asked = now
        waited = now - self._since
        if waited > 0.002:
            time.sleep(0.00005 if waited < 0.5 else 0.0005)
        else:
            os.sched_yield()
        if now - self._asked > 0.02:
            self._asked = now
            if _listener is not None:
                _listener()
            error = _interruption() if _interruption is not None else None
            if error is not None:
                raise error
        return now < self.limit

    def reset(self) -> None:
        """Forget how long one has waited: something moved."""
        self._tests = 0


class Task:
    """One operation on its way."""

    __slots__ = (
        *("_body", "_cannot_complete", "_requests", "done", "error", "lane", "limit", "moved", "on_done"),
        *("in_inference", "timed_out", "timeout"),
    )

    def __init__(
        self,
        body: Body,
        *,
        timeout: float,  # longest wait for the other ranks [s]
        timed_out: Callable[[float], BaseException],  # makes the error, from the seconds waited
        lane: Any = None,  # tasks of one lane run one after another; None: at the same time as all others
        cannot_complete: Callable[[], bool],  # a rank that it needs has exited
    ) -> None:
        self._body, self._requests, self.lane, self.timed_out = body, (), lane, timed_out
        self._cannot_complete = cannot_complete
        self.timeout, self.limit = timeout, time.monotonic() + timeout
        self.done, self.moved, self.error = False, False, None
        # The progress thread writes into tensors of the caller, which may have been made in inference mode.
        self.in_inference = torch.is_inference_mode_enabled()
        self.on_done: Callable[[], None] | None = None

    _requests: Iterable[Any]
    error: BaseException | None

    def step(self) -> bool:
        """Go on if its requests are complete; return whether the operation is over, and note if it moved."""
        for request in self._requests:
            if not request.Test():
                self.moved = False
                return False
        self.moved = True
        try:
            with torch.inference_mode() if self.in_inference else nullcontext():
                self._requests = next(self._body)
        except StopIteration:
            self.done = True
            return True
        return False

    def step_some(self, times: int) -> bool:
        """Step up to so many times; return whether the operation is over, also if it failed."""
        try:
            return any(self.step() for _ in range(times))
        except BaseException as error:  # belongs to whoever waits for the operation
            self.fail(error)
            return True

    def expired(self) -> bool:
        """Return whether there is no point in waiting any longer."""
        return time.monotonic() > self.limit or self._cannot_complete()

    def fail(self, error: BaseException) -> None:
        """End the operation with an error."""
        # MPI may still write to the memory of an abandoned request, so all of it is kept.
        self.error, self.done = error, True
        if self._requests:
            _abandoned.append((self._body, self._requests))


def run_here(task: Task) -> None:
    """Step a task in the calling thread until it is over."""
    pause = Pause(task.limit, spins=400)
    while not task.step():
        if task.moved:
            pause.reset()
        elif not pause() or task.expired():
            error = task.timed_out(task.timeout)
            task.fail(error)
            raise error


class ProgressThread:
    """The one thread of this process that takes tasks and steps them until they are over."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._running: list[Task] = []
        self._lanes: dict[Any, deque[Task]] = {}
        self._thread = threading.Thread(target=self._loop, name="lockstep-mpi", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._inbox.put(task)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function`` in this thread and return what it returns."""
        if threading.current_thread() is self._thread:
            return function(*args)
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
        return value

    def stop(self) -> None:
        """End the thread, once nothing is queued before this call; waits 2 s at most."""
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _loop(self) -> None:
        pause = Pause(float("inf"), spins=5)
        while True:
            try:
                item = self._inbox.get(block=not self._running)
            except queue.Empty:
                item = ()
            if item is None:
                return
            if isinstance(item, Task):
                self._admit(item)
                pause.reset()
            elif callable(item):
                item()
            if self._step_all():
                pause.reset()
            elif self._running:
                self._wait(pause)

    def _wait(self, pause: Pause) -> None:
        try:
            pause()
        except BaseException as error:  # a failure elsewhere ends every task that waits
            for task in list(self._running):
                task.fail(error)
                self._over(task)

    def _admit(self, task: Task) -> None:
        if task.lane is None:
            self._running.append(task)
            return
        waiting = self._lanes.setdefault(task.lane, deque())
        waiting.append(task)
        if len(waiting) == 1:
            self._running.append(task)

    def _step_all(self) -> bool:
        moved = False
        for task in list(self._running):
            try:
                over = task.step()
                if not over and task.expired():
                    task.fail(task.timed_out(task.timeout))
                    over = True
            except BaseException as error:  # belongs to whoever waits for the operation
                task.fail(error)
                over = True
            moved = moved or over or task.moved
            if over:
                self._over(task)
        return moved

    def _over(self, task: Task) -> None:
        self._running.remove(task)
        if task.lane is not None:
            waiting = self._lanes[task.lane]
            waiting.popleft()
            if waiting:
                self._running.append(waiting[0])
            else:
                del self._lanes[task.lane]
        if task.on_done is not None:
            task.on_done()


# -- The handles that operations of the backend ``mpi4py`` return --


class _Completions:
    """Threads that complete futures: one for each that is not complete or has callbacks under way."""

    # A callback may start another operation and wait for it, which the progress thread could not.

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._free, self._taken, self._changed = 0, 0, threading.Condition()

    def take(self) -> None:
        """Have a thread for a future; RuntimeError: none can be started, since Python is shutting down, say."""
        with self._changed:
            if not self._free:
                threading.Thread(target=self._loop, name="lockstep-mpi-future", daemon=True).start()
                self._free += 1
            self._free, self._taken = self._free - 1, self._taken + 1

    def complete(self, future: Future[Any]) -> None:
        """Have the thread set the result, which calls the callbacks; their errors stay in their futures."""
        self._inbox.put(future)

    def wait(self, seconds: float) -> bool:
        """Wait until all futures are complete and their callbacks have returned; return whether they are in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._taken, seconds)

    def _loop(self) -> None:
        while True:
            self._inbox.get().set_result(None)
            with self._changed:
                self._free, self._taken = self._free + 1, self._taken - 1
                self._changed.notify_all()


_completions = _Completions()
wait_for_futures = _completions.wait


class MPIWork(dist.Work):
    """The handle of an operation that the progress thread carries out."""

    def __init__(
        self,
        task: Task,
        tensors: list[Tensor],  # what its future gives
        finish: Callable[[], None] | None = None,  # called by whoever waits, once it is over (CUDA streams)
    ) -> None:
        super().__init__()
        self._task, self._tensors, self._finish = task, tensors, finish
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self._guard = _thread.allocate_lock()
        self._over = False  # the gate is locked for a moment by each waiter, too
        self._future: Future[Any] | None = None
        self._trigger: Future[Any] | None = None
        self.senders: list[int] = []
        task.on_done = self.complete

    def complete(self) -> None:
        """Let those go on who wait for the operation; called once, when it is over."""
        with self._guard:
            self._over, trigger = True, self._trigger
            self._gate.release()
        if trigger is not None:
            _completions.complete(trigger)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is over."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self._gate.acquire(timeout=seconds if seconds > 0 else self._task.timeout + _EXTRA):
            raise self._task.timed_out(seconds if seconds > 0 else self._task.timeout)
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
            if self._future is not None:
                return self._future
            trigger: Future[Any] = Future()
            self._future = future = trigger.then(self._outcome)
            if not self._over:
                with suppress(RuntimeError):  # then this thread waits
                    _completions.take()
                    self._trigger = trigger
                    return future
        self._gate.acquire()
        self._gate.release()
        trigger.set_result(None)
        return future

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
