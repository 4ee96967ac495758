"""Writes what the ranks print to a stream of this process, which may be closed, full or on a full disk."""

from __future__ import annotations

import errno
import io
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

__all__ = ["PATIENCE", "Sink"]

#: How long a full pipe may take to be read on, once the ranks have ended or been told to [s].
PATIENCE = 5.0
_LOOK_EVERY = 0.5  # [s]


class Sink:
    """Writes past Python's buffer, whose lock a blocked write would hold when this process exits."""

    def __init__(self, target: TextIO | None, name: str, on_fault: Callable[[str], None]) -> None:
        self._target, self._name, self._on_fault = target, name, on_fault
        self._said = False  # on_fault is called once
        self._ending: float | None = None
        self._descriptor: int | None = None
        self.moved = 0.0  # when something was last written, by the monotonic clock [s]
        if isinstance(target, io.TextIOWrapper):  # not what a program has put in its place
            with suppress(OSError, ValueError):
                self._descriptor = target.fileno()

    def write(self, text: str) -> None:
        """Write ``text``; wait while a pipe is full, unless the ranks are ending. Never raises."""
        if self._target is None:
            return
        try:
            if self._descriptor is None:
                self._target.write(text)
                self._target.flush()
            else:
                self._write(text.encode(self._target.encoding, errors="replace"), self._descriptor)
        except (OSError, ValueError) as error:
            self._failed(error)

    def expect_end(self) -> None:
        """From now on wait for a full pipe no longer than :data:`PATIENCE`."""
        self._ending = self._ending or time.monotonic()

    def is_stuck(self) -> bool:
        """Return whether nothing has been written for longer than that."""
        return self._ending is not None and time.monotonic() - max(self.moved, self._ending) > PATIENCE

    def _write(self, data: bytes, descriptor: int) -> None:
        while data:
            while not select.select([], [descriptor], [], _LOOK_EVERY)[1]:
                if self.is_stuck():
                    raise TimeoutError(errno.ETIMEDOUT, "it is full and nobody reads it")
            # A pipe that is ready takes this much without blocking.
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]
            self.moved = time.monotonic()

    def _failed(self, error: OSError | ValueError) -> None:
        # A disk may have room again; a pipe whose reader is gone stays so.
        if not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
            self._target = None
        if not self._said:
            self._said = True
            self._on_fault(
                f"lightning-lockstep: {self._name} cannot be written to ({error}). The ranks go on; what they"
                " print there is lost.\n"
            )
