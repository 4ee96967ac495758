"""Lets several threads bring lines to one ordering without making any of them wait for a slow console."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning_lockstep.logs.lines import Line
from lightning_lockstep.logs.ordering import Batch, LineOrdering

__all__ = ["OrderingThread"]

Work = Callable[[], list[Batch]]


class OrderingThread:
    """Owns a :class:`LineOrdering` and prints what comes out of it.

    The receiving thread does its work at once and prints, without a detour over another thread. The main
    thread only queues its work; the next thread that has access to the ordering does it.
    """

    def __init__(
        self,
        ordering: LineOrdering,
        # Called by one thread at a time, in the order in which batches were ready.
        print_batch: Callable[[Batch], None],
        *,
        name: str,  # of the thread that prints what has waited long enough
        look_every: float,  # time between two of its looks [s]
    ) -> None:
        self.ordering, self._print_batch, self._look_every = ordering, print_batch, look_every
        self._queued: deque[Work] = deque()
        self._ready: deque[Batch] = deque()
        self._access = threading.Lock()
        self._printing = threading.RLock()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = False
        self._name = name
        self._thread: threading.Thread | None = None

    def receive(self, packed: Sequence[Sequence[Any]]) -> None:
        """Take lines of other ranks, packed, and print what is ready, on this thread."""
        now = time.monotonic()
        self._queue(lambda: [batch for p in packed for batch in self.ordering.add(Line.unpack(p), now)])
        self._run()

    def add(self, make: Callable[[], Line]) -> None:
        """Take a line of this rank, made on another thread in the order of the calls; returns at once."""
        now = time.monotonic()
        self._queue(lambda: self.ordering.add(make(), now))
        # A line that can only wait wakes nobody: whoever comes to the ordering next takes it along, the
        # thread of this object at the latest. The order matters: the line was queued before this look. So
        # whoever fills the ordering now finds the line queued, too, or this look finds the ordering filled.
        if not self.ordering.empty:
            self._wake.put(None)

    def do(self, work: Work) -> None:
        """Have ``work`` done soon, on another thread; returns at once."""
        self._queue(work)
        self._wake.put(None)

    @property
    def busy(self) -> bool:
        """Whether a line waits for those of other ranks."""
        return bool(self._queued) or self.ordering.holds_lines

    def flush(self) -> None:
        """Print all that is held back, here, and wait for a thread that is just printing."""
        self._queued.append(lambda: self.ordering.flush(time.monotonic()))
        # Another thread may have access, with lines in hand that it has not laid out for printing yet.
        # The limit is for a signal handler that has interrupted its own thread there.
        if self._access.acquire(timeout=1.0):
            self._access.release()
        self._run()

    def stop(self) -> None:
        self._ended = True
        self._wake.put(None)

    def _queue(self, work: Work) -> None:
        self._queued.append(work)
        if self._thread is None and not self._ended:
            self._thread = threading.Thread(target=self._print_when_due, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Do the work that is queued, unless another thread is about to, and print."""
        while self._queued and self._access.acquire(blocking=False):
            try:
                while self._queued:
                    self._ready.extend(self._queued.popleft()())
            finally:
                self._access.release()
        with self._printing:
            while self._ready:
                self._print_batch(self._ready.popleft())

    def _print_when_due(self) -> None:
        while not self._ended:
            self._queued.append(lambda: self.ordering.due(time.monotonic()))
            self._run()
            with self._access:
                due = self.ordering.next_due()
            if self._queued:
                continue  # somebody came while this thread had access, and has left work here
            patience = self._look_every if due is None else max(0.0, due - time.monotonic())
            with suppress(queue.Empty):
                self._wake.get(timeout=min(patience, self._look_every))
