"""Threads of torch's backends that still hold something of the last operation when Python ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["wait_for_backend_threads"]

#: What torch calls the threads in which gloo runs its operations, cut to the length that Linux keeps.
_NAMES = frozenset({"pt_gloo_runloop"})
_PAUSE = 0.001
_LOOKS = 2


def wait_for_backend_threads(timeout: float = 2.0) -> bool:
    """Wait, up to ``timeout`` [s], until no thread of gloo is at work here; return whether none is.

    Such a thread lets go of the tensors of an operation a moment after it has said that the operation is done. Where
    Python ends in this moment, the thread cannot get Python's lock to do so, is ended in the middle, and C++ answers
    with an abort: "terminate called without an active exception", and exit code 134 of a rank that has done its work.
    Seen with torch 2.13 (``ProcessGroupGloo::runLoop``). Threads that wait, for work or for another rank, are at rest.
    """
    deadline = time.monotonic() + timeout
    at_rest = 0
    while at_rest < _LOOKS:
        time.sleep(_PAUSE)  # Python's lock is free meanwhile, for whoever waits for it
        at_rest = 0 if any(state != "S" for state in _states()) else at_rest + 1
        if time.monotonic() > deadline:
            return False
    return True  # also where there is no /proc


def _states() -> Iterator[str]:
    """Yield the state of each such thread: ``S`` where it sleeps."""
    for folder in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # a thread that has just ended
            head, _, tail = (folder / "stat").read_text().rpartition(")")
            if head.partition("(")[2] in _NAMES:
                yield tail.split()[0]
