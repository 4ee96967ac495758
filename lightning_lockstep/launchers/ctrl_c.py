"""Ctrl-C for a main thread that sits in a collective.

Python runs signal handlers on the main thread, between two bytecodes, which a rank that waits in C++ for a
peer never reaches. But the handler in C writes the signal's number to a wake-up descriptor, which a thread here
reads.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from lightning_lockstep.distributed.failure.process_exit import leaving

__all__ = ["watch_interrupts"]


# on_stuck: is called on a thread of its own, and ends the process by force; patience: [s]
def watch_interrupts(on_stuck: Callable[[], None], *, patience: float) -> Callable[[], None]:
    """Call ``on_stuck`` when Ctrl-C was pressed and ``patience`` seconds later this process is still about to end.

    That is, when Python's handler was not reached, or was and the process is leaving because of a failure. A program
    that handles the ``KeyboardInterrupt`` itself goes on. The function returned ends the watch.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:  # another library uses it, so nothing is watched
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()
        return lambda: None
    watch = _Watch(reader, writer, on_stuck, patience)
    watch.start()
    return watch.end


class _Watch:
    def __init__(
        self, reader: socket.socket, writer: socket.socket, on_stuck: Callable[[], None], patience: float
    ) -> None:
        # The signal handler knows the writer by number only: somebody has to hold the socket itself.
        self._reader, self._writer = reader, writer
        self._on_stuck, self._patience = on_stuck, patience
        self._ended, self._handled = threading.Event(), threading.Event()
        self._usual = signal.getsignal(signal.SIGINT)

    def start(self) -> None:
        if callable(self._usual):
            signal.signal(signal.SIGINT, self._note)
        threading.Thread(target=self._run, name="lockstep-interrupt", daemon=True).start()

    def end(self) -> None:
        self._ended.set()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGINT) == self._note:
                signal.signal(signal.SIGINT, self._usual)
        self._writer.close()
        time.sleep(0)
        self._reader.close()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._handled.set()
        assert callable(self._usual)
        self._usual(signum, frame)

    def _run(self) -> None:
        with suppress(OSError):
            while not self._ended.is_set() and (numbers := self._reader.recv(16)):
                if signal.SIGINT in numbers and not self._ended.wait(self._patience):
                    if leaving() or not self._handled.is_set():
                        self._on_stuck()
                        return
                    self._handled.clear()
