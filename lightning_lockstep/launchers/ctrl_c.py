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

__all__ = ["watch_interrupts"]


def watch_interrupts(on_stuck: Callable[[], None], *, patience: float) -> Callable[[], None]:
    """Call ``on_stuck`` when Ctrl-C was pressed and this process has not ended ``patience`` seconds later.

    Args:
        on_stuck: Ends the process by force; called on a thread of its own.
        patience: Time for an orderly exit [s].

    Returns:
        A function that ends the watch. Where another library already uses the wake-up descriptor, or off
        the main thread, nothing is watched.

    Ranks: the rank that owns the terminal; nothing is sent.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()
        return lambda: None
    ended = threading.Event()

    def watch(keep_open: socket.socket) -> None:
        # The signal handler knows the writer by number only: somebody has to hold the socket itself.
        while not ended.is_set():
            try:
                numbers = reader.recv(16)
            except OSError:
                return
            if not numbers:
                return
            if signal.SIGINT in numbers:
                if not ended.wait(patience):
                    on_stuck()
                return

    threading.Thread(target=watch, args=(writer,), name="lockstep-interrupt", daemon=True).start()

    def end() -> None:
        ended.set()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        writer.close()
        time.sleep(0)
        reader.close()

    return end
