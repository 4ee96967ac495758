"""What the thread that trains is doing, asked from another thread, and a way to raise an error in it.

That is the main thread of the process, unless the fit was started in another one, as Ray Train does.
"""

from __future__ import annotations

import ctypes
import dis
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from lightning_lockstep.distributed.guard.calls.call_report import is_library_module, site_text
from lightning_lockstep.distributed.guard.calls.group_names import WORLD, group_titles

__all__ = [
    "WAIT",
    "MainThreadErrors",
    "Position",
    "position",
    "position_of_error",
    "waits_for_import",
]

# Frames of the stack that a report shows.
_SHOWN_FRAMES = 12
# Ignored by default, so that it does no harm where no handler is installed.
_SIGNAL = signal.SIGURG
#: Stands for the function of a main thread that waits by a handle.
WAIT = "wait"
_C10D = "torch.distributed.distributed_c10d"


class Position(NamedTuple):
    """Where a thread is."""

    site: str  # nearest place in the user's own program
    stack: tuple[str, ...]  # innermost first
    # Of torch.distributed, such as ``broadcast``; ``wait``: it waits by a handle; empty: it is in none.
    function: str = ""
    arguments: Mapping[str, str] = {}  # of that function, what reports show: ``op``, ``src``, ``dst``
    group: str = ""  # what reports call the process group it was given; empty: not known


def position(thread: threading.Thread) -> Position:
    """Return where a thread is now."""
    return _position([(one, one.f_lineno) for one in _frames(_frame_of(thread))])


def position_of_error(error: BaseException) -> Position:
    """Return where an error was raised."""
    places, traceback = [], error.__traceback__
    while traceback is not None:
        places.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _position(places[::-1])


def _position(places: Sequence[tuple[FrameType, int]]) -> Position:
    """Return what is shown of frames and their lines, innermost first."""
    stack = tuple(_place(frame, line) for frame, line in places[:_SHOWN_FRAMES])
    sites = (_site(frame, line) for frame, line in places)
    site = next(filter(None, sites), stack[0] if stack else "")
    inside = [frame for frame, _ in places if frame.f_globals.get("__name__") == _C10D]
    if inside:
        # Functions that send and receive objects do so by others, which tell more.
        frame = next((one for one in inside if one.f_code.co_name in ("send", "recv")), inside[-1])
        return Position(site, stack, frame.f_code.co_name, _arguments(frame), _group(frame))
    return Position(site, stack, WAIT if places and _calls_wait(places[0][0]) else "")


def _calls_wait(frame: FrameType) -> bool:
    """Return whether the innermost function is in a call of C by the name ``wait``, as that of a work handle."""
    name = ""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = instruction.argval
    return name == WAIT


def _frame_of(thread: threading.Thread) -> FrameType | None:
    return sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _site(frame: FrameType, line: int) -> str:
    """Return what a report shows of a frame of the user's program, or of autograd; empty for others."""
    name = frame.f_globals.get("__name__", "")
    if name.startswith("torch.autograd"):
        return "backward"
    is_standard = name.partition(".")[0] in sys.stdlib_module_names - {"__main__"}
    return "" if is_standard or is_library_module(name) else _place(frame, line)


def _place(frame: FrameType, line: int) -> str:
    return site_text(frame.f_code.co_filename, line, frame.f_code.co_name)


def _arguments(frame: FrameType) -> dict[str, str]:
    found = {name: frame.f_locals.get(name) for name in ("op", "src", "dst", "group_src", "group_dst")}
    return {name: str(value).lower().rpartition(".")[2] for name, value in found.items() if value is not None}


def _group(frame: FrameType) -> str:
    group = frame.f_locals.get("group", "")
    if group is None:
        return WORLD
    title, _ = group_titles().get(getattr(group, "group_name", ""), ("", ()))
    return title


def waits_for_import(thread: threading.Thread) -> bool:
    """Return whether a thread is in Python's import system, perhaps since another one imports the same."""
    frame = _frame_of(thread)
    return frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap"


class MainThreadErrors:
    """Raises an error in the thread that trains from another thread, also while that sleeps or waits for a lock.

    In a call of C it gets the error when that call returns. So it does in all that waits, if it is not the main thread:
    Python runs handlers of signals in that one alone.
    """

    def __init__(self, is_critical: Callable[[FrameType], bool]) -> None:
        self._is_critical = is_critical  # at such a frame nothing is raised: that deals with errors itself
        self._pending: BaseException | None = None
        self._thread = threading.current_thread()
        self._by_signal = False
        self._before: Any = None
        self._process = os.getpid()

    def install(self) -> None:
        """Take the calling thread for the one that trains; begin to handle the signal that wakes it."""
        self._thread = threading.current_thread()
        if self._thread is threading.main_thread() and not self._by_signal:
            self._before = signal.signal(_SIGNAL, self._woken)
            self._by_signal = True

    def remove(self) -> None:
        """Give the signal back; in the main thread."""
        if self._by_signal and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._before)
            self._by_signal = False

    def raise_soon(self, error: BaseException) -> None:
        """Raise ``error`` in the thread that trains; called in another one, returns at once."""
        self._pending = error
        ident = ctypes.c_ulong(self._thread.ident or 0)
        if self._by_signal and self._thread is threading.main_thread():
            signal.pthread_kill(ident.value, _SIGNAL)
        elif not self._is_left_to(_frame_of(self._thread)):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(self._class_that_makes(error)))

    def take(self) -> BaseException | None:
        """Return the error that was to be raised and has not been, once."""
        error, self._pending = self._pending, None
        return error

    def _class_that_makes(self, error: BaseException) -> type[BaseException]:
        """Return a class of which Python, which is given no more than a class, makes ``error`` itself."""

        def make(cls: type[BaseException]) -> BaseException:
            self.take()
            return error

        kind = type(error)
        return type(kind.__name__, (kind,), {"__new__": make, "__module__": kind.__module__})

    def _is_left_to(self, frame: FrameType | None) -> bool:
        """Return whether the code at a frame, or what has called it, asks for the error itself."""
        return any(self._is_critical(one) for one in _frames(frame))

    def _woken(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        if self._pending is None or os.getpid() != self._process or self._is_left_to(frame):
            return
        error = self.take()
        if error is not None:
            raise error
