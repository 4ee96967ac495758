"""What must be written out before a process ends, whichever way it ends.

A process that stops after another rank's failure ends with ``os._exit``: nothing registered with ``atexit``
runs then. Whoever holds text back (ordered log lines, messages not yet handed to the store) registers here.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
from collections.abc import Callable
from contextlib import suppress

__all__ = ["at_process_end", "on_flush", "run_flushers"]

_log = logging.getLogger(__name__)
_flushers: list[Callable[[], None]] = []


def on_flush(flusher: Callable[[], None]) -> Callable[[], None]:
    """Have ``flusher`` called before this process ends by force.

    Args:
        flusher: Writes out what is held back; called on any thread, more than once, and must not wait for
            another rank longer than a second.

    Returns:
        A function that takes it off the list again.

    Ranks: any rank, alone; nothing is sent.
    """
    _flushers.append(flusher)

    def remove() -> None:
        with suppress(ValueError):
            _flushers.remove(flusher)

    return remove


def run_flushers() -> None:
    """Call every flusher, the newest first; one that fails is logged and does not stop the others.

    Ranks: any rank, alone, on its way out.
    """
    for flusher in reversed(list(_flushers)):
        _run(flusher)


def _run(flusher: Callable[[], None]) -> None:
    try:
        flusher()
    except Exception:
        _log.exception("could not write out what %r holds back", flusher)


def at_process_end(function: Callable[[], None]) -> None:
    """Have ``function`` called when this process ends in an orderly way.

    A process that :mod:`multiprocessing` started leaves without what :mod:`atexit` holds, up to Python 3.12,
    but not without its own finalizers.

    Args:
        function: Called once or twice; the second time it must find nothing to do.

    Ranks: any rank, alone; nothing is sent.
    """
    atexit.register(function)
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, function, exitpriority=100)
