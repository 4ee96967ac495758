"""Passes signals on to the ranks from the process that has started them and is no rank itself."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["ASKS_TO_END", "SignalForwarding"]

_PASSED_ON = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
#: Signals that ask the ranks to end.
ASKS_TO_END = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
# `timeout` and schedulers send a signal to a process and at the same time to its group [s].
_SAME = 1.0
# Ranks that were asked to end may have a large checkpoint to write [s].
_LIMIT = 600.0


class SignalForwarding:
    """While it is entered, signals that would end this process go to its ranks, and this process goes on.

    SIGTERM and SIGHUP ask the ranks to end. When one of these comes again, or the ranks have not ended after
    10 minutes, they are ended by force. A signal that this process ignores, as under ``nohup``, is left alone.
    """

    def __init__(
        self, send: Callable[[int], None], force: Callable[[], None], *, limit: float = _LIMIT
    ) -> None:
        self._send, self._force, self._limit = send, force, limit  # limit: [s]
        self.asked: signal.Signals | None = None  # the first that asked the ranks to end
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarding:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in _PASSED_ON:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a handler in C
                    self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """End the ranks by force if they have not ended in time; to be called now and then."""
        if self.asked is not None and time.monotonic() - self._since > self._limit:
            self._force()

    def _arrived(self, number: int, _: FrameType | None) -> None:
        if number not in ASKS_TO_END:
            self._send(number)
        elif self.asked is None:
            self.asked, self._since = signal.Signals(number), time.monotonic()
            self._send(number)
        elif time.monotonic() - self._since > _SAME:
            self._force()
