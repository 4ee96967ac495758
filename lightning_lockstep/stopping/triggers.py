"""What can ask for a stop from outside of the program: a signal, and a file."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["SignalWatch", "StopFileWatch"]

Ask = Callable[[str], None]


class SignalWatch:
    """Takes signals over from Lightning while a fit runs.

    Lightning answers a SIGTERM with a broadcast from inside the handler, which pairs up with whatever
    collective the other ranks are in. This handler only notes the wish.

    Args:
        numbers: The signals.
        ask: Called with a reason when one arrives; must be safe in a signal handler.
    """

    def __init__(self, numbers: Sequence[signal.Signals], ask: Ask) -> None:
        self._numbers, self._ask = tuple(numbers), ask
        self._before: dict[signal.Signals, Any] = {}
        self._of_user: dict[signal.Signals, Any] = {}
        self.came: set[signal.Signals] = set()

    def install(self, of_user: dict[Any, Any]) -> None:
        """Take over, unless that is done already.

        Args:
            of_user: Handlers from before the fit, which keep being called.

        Ranks: every rank, from its main thread; elsewhere nothing happens.
        """
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in self._numbers:
            handler = of_user.get(number)
            self._of_user[number] = handler if callable(handler) else None
            self._before[number] = signal.signal(number, self._arrived)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._arrived:
                signal.signal(number, handler)
        self._before.clear()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        known = signal.Signals(number)
        if known not in self.came:  # schedulers repeat themselves
            self.came.add(known)
            self._ask(f"received {known.name}")
        if self._of_user.get(known) is not None:
            self._of_user[known](number, frame)


class StopFileWatch:
    """Looks for a file, on a thread of its own.

    Args:
        path: The file. Whoever obeys it removes it, so that the resumed run does not stop again.
        ask: Called once with a reason when the file is there.
        interval: Time between two looks [s].
    """

    def __init__(self, path: Path, ask: Ask, *, interval: float = 1.0) -> None:
        self.path, self._ask, self._interval = path, ask, interval
        self._ended = threading.Event()
        self.seen = False
        self._thread = threading.Thread(target=self._watch, name="lockstep-stop-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch."""
        self._ended.set()
        self._thread.join(5.0)

    def remove_file(self) -> None:
        """Remove the file if this process saw it."""
        if self.seen:
            with suppress(OSError):
                self.path.unlink()

    def _watch(self) -> None:
        while not self._ended.is_set():
            if self.path.exists():
                self.seen = True
                self._ask(f"found the stop file {self.path}")
                return
            self._ended.wait(self._interval)
