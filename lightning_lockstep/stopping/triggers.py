"""What can request a stop from outside of the program: a signal, and a file."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["SignalWatch", "StopFileWatch"]

Request = Callable[[str], None]


class SignalWatch:
    """Takes signals over from Lightning while a fit runs; made before Lightning sets its own handlers.

    Lightning answers a SIGTERM with a broadcast from inside the handler, which pairs up with whatever
    collective the other ranks are in. This handler only makes a request, and calls the user's own.
    """

    def __init__(self, numbers: Sequence[signal.Signals], request: Request) -> None:
        self._request = request  # must be safe in a signal handler
        self._of_user = {number: signal.getsignal(number) for number in numbers}
        self._before: dict[signal.Signals, Any] = {}
        self._received: set[signal.Signals] = set()

    def install(self) -> None:
        """Take over, unless that is done already or this is not the main thread."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in self._of_user:
            self._before[number] = signal.signal(number, self._arrived)

    def restore(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._arrived:
                signal.signal(number, handler)
        self._before.clear()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        known = signal.Signals(number)
        if known not in self._received:  # schedulers repeat themselves
            self._received.add(known)
            self._request(f"received {known.name}")
        handler = self._of_user[known]
        if callable(handler):
            handler(number, frame)


class StopFileWatch:
    """Looks for a file, on a thread of its own."""

    def __init__(self, path: Path, request: Request, *, interval: float = 1.0) -> None:  # [s]
        self.path, self._request, self._interval = path, request, interval
        self._ended = threading.Event()
        self.seen = False
        self._thread = threading.Thread(target=self._watch, name="lockstep-stop-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5.0)

    def remove_file(self) -> None:
        """Remove the file if this process saw it, so that the resumed run does not stop again."""
        if self.seen:
            with suppress(OSError):
                self.path.unlink()

    def _watch(self) -> None:
        while not self._ended.is_set():
            if self.path.exists():
                self.seen = True
                self._request(f"found the stop file {self.path}")
                return
            self._ended.wait(self._interval)
