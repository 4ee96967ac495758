"""What ties ranks to the process that has started them: signals go to them, and they end when it is gone."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning_lockstep.distributed.failure.process_exit import end_now

#: Signals that ask the ranks to end.
ASKS_TO_END = (signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*ASKS_TO_END, signal.SIGUSR1, signal.SIGUSR2)
# `timeout` and schedulers send a signal to a process and at the same time to its group [s].
_SAME = 1.0
# How often a rank looks whether the process that has started it lives [s].
_LOOK_EVERY = 0.25


class SignalForwarding:
    """While it is entered, signals that would end this process go to its ranks, and this process goes on."""

    # SIGTERM and SIGHUP ask the ranks to end; when one of these comes again, they are ended by force. A signal
    # that this process ignores, as under ``nohup``, is left alone.

    def __init__(self, send: Callable[[int], None], force: Callable[[], None]) -> None:
        self._send, self._force = send, force
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

    def _arrived(self, number: int, _: FrameType | None) -> None:
        if number not in ASKS_TO_END:
            self._send(number)
        elif self.asked is None:
            self.asked, self._since = signal.Signals(number), time.monotonic()
            self._send(number)
        elif time.monotonic() - self._since > _SAME:
            self._force()


def end_with_parent(parent_lives: Callable[[], bool], unless: Callable[[], bool] = lambda: False) -> None:
    """End this rank when the process that has started it has ended, ``unless`` it is dealt with otherwise."""

    def watch() -> None:
        while parent_lives():
            time.sleep(_LOOK_EVERY)
        if not unless():
            text = "the process that started this rank has exited; this rank exits too."
            end_now(1, f"\nlightning-lockstep: {text}\n")

    threading.Thread(target=watch, name="lockstep-parent", daemon=True).start()
