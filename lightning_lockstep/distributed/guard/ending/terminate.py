"""A last word before C++ ends this process.

gloo throws in a thread of its own when a peer sends more than was expected; nobody can catch that, and the C++ library
aborts the process. It calls a function before, which may be set.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

__all__ = ["before_terminate"]

# std::set_terminate of the C++ library that torch is linked with.
_LIBRARY, _SET = "libstdc++.so.6", "_ZSt13set_terminatePFvvE"
_Handler = ctypes.CFUNCTYPE(None)
_function: Callable[[], None] | None = None
_kept: list[object] = []  # what C++ holds a pointer to must live


def before_terminate(function: Callable[[], None] | None) -> bool:
    """Have ``function`` called, in whichever thread that is, before C++ aborts this process over an error.

    It may wait, and may end the process; ``None``: nothing is called any more. Returns whether that is
    possible here.
    """
    global _function
    _function = function
    return bool(_kept) or (function is not None and _install())


def _install() -> bool:
    try:
        set_terminate = getattr(ctypes.CDLL(_LIBRARY), _SET)
    except (OSError, AttributeError):  # another C++ library
        return False
    set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
    process = os.getpid()

    def handler() -> None:
        if _function is not None and os.getpid() == process:
            with suppress(Exception):
                _function()
        _Handler(before)()

    pointer = _Handler(handler)
    before = set_terminate(ctypes.cast(pointer, ctypes.c_void_p))
    _kept.append(pointer)
    return True
