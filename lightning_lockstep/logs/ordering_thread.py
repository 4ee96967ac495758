"""Lets several threads write into one order book without ever making one of them wait."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lightning_lockstep.logs.ordering import Batch, LineOrdering, OnceBook

__all__ = ["OrderingThread"]

Work = Callable[[], list[Batch]]


class OrderingThread:
    """Owns an order book and prints what comes out of it.

    The receiving thread does its work at once and prints, without a detour over another thread. The main
    thread, which must not wait for a slow console, only brings its work; whoever is at the book next does it.

    Args:
        book: The book.
        on_batches: Prints batches; called by one thread at a time, in the order in which they were ready.
        name: Name of the thread that looks after what has waited long enough.
        look_every: Time between two of its looks [s].
    """

    def __init__(
        self,
        book: LineOrdering | OnceBook,
        on_batches: Callable[[list[Batch]], None],
        *,
        name: str,
        look_every: float,
    ) -> None:
        self.book, self._on_batches, self._look_every = book, on_batches, look_every
        self._inbox: deque[Work] = deque()
        self._ready: deque[Batch] = deque()
        self._at_book = threading.Lock()
        self._printing = threading.RLock()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = False
        self._name = name
        self._thread: threading.Thread | None = None

    def do(self, work: Work, *, print_here: bool, can_wait: bool = False) -> None:
        """Have ``work`` done soon; returns at once.

        Args:
            work: Changes the book and returns what can be printed.
            print_here: Whether this thread may do it and print, or another one must.
            can_wait: Whether nothing can come of it as long as the book is empty. Then nobody is woken for
                it: whoever comes to the book next does it, the thread of this object at the latest.
        """
        self._inbox.append(work)
        if self._thread is None and not self._ended:
            self._start()
        if print_here:
            self._work_off()
            self._print_ready()
        elif not (can_wait and self.book.empty):
            # The order matters: the work was brought before the look at the book. So either whoever fills
            # the book now finds the work there, too, or this look finds the book filled.
            self._bell.put(None)

    @property
    def busy(self) -> bool:
        """Whether a line waits for those of other ranks."""
        return bool(self._inbox) or self.book.holds_lines

    def flush(self) -> None:
        """Print all that is held back, here, and wait for a thread that is just printing."""
        self._inbox.append(lambda: self.book.flush(time.monotonic()))
        # Another thread may be at the book, with lines in hand that it has not laid out for printing yet.
        # The limit is for a signal handler that has interrupted its own thread there.
        if self._at_book.acquire(timeout=1.0):
            self._at_book.release()
        self._work_off()
        self._print_ready()

    def stop(self) -> None:
        """End the thread."""
        self._ended = True
        self._bell.put(None)

    def _work_off(self) -> None:
        while self._inbox and self._at_book.acquire(blocking=False):
            try:
                while self._inbox:
                    self._ready.extend(self._inbox.popleft()())
            finally:
                self._at_book.release()

    def _print_ready(self) -> None:
        with self._printing:
            while self._ready:
                self._on_batches([self._ready.popleft()])

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._look_after, name=self._name, daemon=True)
        self._thread.start()

    def _look_after(self) -> None:
        while not self._ended:
            self._inbox.append(lambda: self.book.due(time.monotonic()))
            self._work_off()
            self._print_ready()
            with self._at_book:
                due = self.book.next_due()
            if self._inbox:
                continue  # somebody came while this thread was at the book, and has left work here
            patience = self._look_every if due is None else max(0.0, due - time.monotonic())
            with suppress(queue.Empty):
                self._bell.get(timeout=min(patience, self._look_every))
