"""What the threads of this process do, as Linux knows it; nothing is known elsewhere."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["ThreadLook", "look_at", "other_threads"]

# Threads that work for this package, or for ZeroMQ under it: by their names in Python, and in C.
_OURS, _OURS_IN_C = "lockstep-", "ZMQbg"
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
# Calls of Linux that read from or write to the file that their first argument names, and those of them that write.
_CALLS = {
    "x86_64": (
        {0, 17, 19, 295, 74, 75, 326},  # read, pread64, readv, preadv, fsync, fdatasync, copy_file_range
        {1, 18, 20, 296, 40},  # write, pwrite64, writev, pwritev, sendfile
    ),
    "aarch64": ({63, 67, 65, 69, 82, 83, 285}, {64, 68, 66, 70, 71}),
}
_READS, _WRITES = _CALLS.get(platform.machine(), (set[int](), set[int]()))


class ThreadLook(NamedTuple):
    """What a thread has done so far, and what it is in the middle of."""

    seconds: float  # CPU time [s]
    bytes: float  # read and written by calls that have returned
    waits_for: str = ""  # ``file``: in a call on one, or for a disk; ``pipe``: it writes into one
    wakes: int = 0  # how often it has been woken; known where it writes into a pipe

    def goes_on_from(self, earlier: ThreadLook) -> bool:
        """Return whether the call that it waits in goes on: a reader of a pipe wakes the writer each time."""
        if self.waits_for != earlier.waits_for:
            return False
        return self.waits_for == "file" or (self.waits_for == "pipe" and self.wakes > earlier.wakes)


def look_at(thread: int) -> ThreadLook | None:
    """Return what a thread does; ``None``: it has ended, is this package's, or the system does not say."""
    try:
        name, _, rest = _read(thread, "stat").partition("(")[2].rpartition(")")
        state, *numbers = rest.split()
        seconds = (int(numbers[10]) + int(numbers[11])) / _TICKS
    except (OSError, ValueError, IndexError):
        return None
    if name.startswith(_OURS_IN_C):
        return None
    return ThreadLook(seconds, _bytes(thread), *_waits_for(thread, state))


def other_threads(than: int | None) -> Iterator[tuple[int, ThreadLook]]:
    """Return the threads of this process but one and those that work for this package, with their numbers."""
    ours = {one.native_id for one in threading.enumerate() if one.name.startswith(_OURS)}
    with suppress(OSError):
        for folder in Path("/proc/self/task").iterdir():
            thread = int(folder.name)
            if thread != than and thread not in ours and (look := look_at(thread)) is not None:
                yield thread, look


def _bytes(thread: int) -> float:
    with suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(": ") for line in _read(thread, "io").splitlines())
        return float(fields["rchar"]) + float(fields["wchar"])
    return 0.0


def _waits_for(thread: int, state: str) -> tuple[str, int]:
    if state == "D":
        return "file", 0
    if state != "S":
        return "", 0
    with suppress(OSError, ValueError):
        number, first, *_ = _read(thread, "syscall").split()
        if int(number) not in _READS | _WRITES:
            return "", 0
        # What the link says comes from the kernel alone: a file that hangs is not asked.
        target = str(Path(f"/proc/self/fd/{int(first, 16)}").readlink())
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            return "file", 0
        if target.startswith("pipe:") and int(number) in _WRITES:
            return "pipe", _wakes(thread)
    return "", 0


def _wakes(thread: int) -> int:
    (line,) = (one for one in _read(thread, "status").splitlines() if one.startswith("voluntary_ctxt"))
    return int(line.rpartition(":")[2])


def _read(thread: int, name: str) -> str:
    return Path(f"/proc/self/task/{thread}/{name}").read_text(encoding="utf-8", errors="replace")
