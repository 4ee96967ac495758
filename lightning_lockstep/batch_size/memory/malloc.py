"""How the C library keeps freed memory, which decides what a batch needs on CPU.

glibc returns a freed block to the system when it was large enough to be mapped by itself. It raises what
"large enough" means to the largest block freed so far (up to 32 MiB), and keeps the others for itself, where
the next batch's blocks may or may not fit into the holes. What a step needs then depends on all that ran
before it: half as much again was seen, and a size that fitted may not fit when it is tried again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

__all__ = ["keep_freed_memory", "return_freed_memory", "trim"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_RETURNED_FROM = 2**20
_KEPT_UP_TO = 32 * 2**20  # where glibc's own growth ends


@cache
def _c_library() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


@cache
def _function(name: str) -> Callable[..., int] | None:
    return getattr(_c_library(), name, None)


def trim() -> None:
    """Return what malloc keeps unused to the system, where the C library can."""
    function = _function("malloc_trim")
    if function is not None:
        function(0)


def return_freed_memory() -> None:
    """Let every block of 1 MiB or more go back to the system when it is freed.

    Memory in use is then what is alive: the same step needs the same, whatever ran before it. The system has to
    supply the pages again in the next step, which takes time. Does nothing where the C library is not glibc, or where
    the environment has set its thresholds.
    """
    _set_thresholds(_RETURNED_FROM)


def keep_freed_memory() -> None:
    """Let freed blocks of up to 32 MiB stay with malloc, as glibc comes to do by itself."""
    _set_thresholds(_KEPT_UP_TO)


def _set_thresholds(size: int) -> None:
    mallopt = _function("mallopt")
    own = "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is None or _function("gnu_get_libc_version") is None or own:
        return
    mallopt(_MMAP_THRESHOLD, size)
    mallopt(_TRIM_THRESHOLD, 2 * size)
