"""What the main thread of this process is doing, asked from another thread, and a way to raise an error in it."""

from __future__ import annotations

import ctypes
import dis
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import psutil

from lightning_lockstep.distributed.guard.call_report import is_library_module, site_text
from lightning_lockstep.distributed.guard.group_names import WORLD, group_titles

__all__ = [
    "WAIT",
    "Activity",
    "MainThreadErrors",
    "Position",
    "position",
    "position_of_error",
    "waits_for_import",
]

# What counts as moving: so much of one core, by the main thread or by child processes that are no ranks ...
_BUSY_SHARE = 0.05
# ... or so much read and written by the main thread [bytes/s].
_IO_RATE = 100_000.0
# Frames of the stack that a report shows.
_SHOWN_FRAMES = 12
# Ignored by default, so that it does no harm where no handler is installed.
_SIGNAL = signal.SIGURG
#: Stands for the function of a main thread that waits by a handle.
WAIT = "wait"
_C10D = "torch.distributed.distributed_c10d"


class Position(NamedTuple):
    """Where the main thread is.

    Attributes:
        site: Nearest place in the user's own program.
        stack: All places, innermost first.
        function: Function of ``torch.distributed`` that it is in, such as ``broadcast``; ``wait`` where it waits by a
            handle, such as that of an ``irecv``; empty where it is in none.
        arguments: What that function was called with, as far as a report shows it: ``op``, ``src``, ``dst``.
        group: What reports call the process group that it was called with; empty where that is not known.
    """

    site: str
    stack: tuple[str, ...]
    function: str = ""
    arguments: Mapping[str, str] = {}
    group: str = ""


def position() -> Position:
    """Return where the main thread is now.

    Ranks: any rank, alone, from any thread; nothing is sent.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _position([(one, one.f_lineno) for one in _frames(frame)])


def position_of_error(error: BaseException) -> Position:
    """Return where an error was raised.

    Ranks: any rank, alone; nothing is sent.
    """
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


def waits_for_import() -> bool:
    """Return whether the main thread is in Python's import system, perhaps because another thread imports the same.

    Ranks: any rank, alone, from any thread; nothing is sent.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap"


class _Sample(NamedTuple):
    time: float
    busy: float
    bytes: float
    children: float | None


class Activity:
    """Tells whether the main thread moves: whether it computes, reads or writes, or waits for a process that does.

    A thread that sleeps, or polls something now and then, does not move.

    Args:
        window: How far back it looks [s].
        is_rank: Returns whether a child process is a rank of the run, which moves for itself.
    """

    def __init__(self, window: float, is_rank: Callable[[int], bool]) -> None:
        self._window, self._is_rank = window, is_rank
        self._samples: deque[_Sample] = deque()
        self._main = threading.main_thread()
        self._held_up = 0.0

    def look(self, *, children: bool, held_up: bool = False) -> None:
        """Take a sample; to be called a few times in each window, from one thread.

        Args:
            children: Whether to look at child processes too, which takes some milliseconds.
            held_up: Whether the main thread waits for another thread of this package, so that the time since the last
                sample counts as if it had moved.

        Ranks: any rank, alone; nothing is sent.
        """
        now = time.monotonic()
        if held_up and self._samples:
            self._held_up += now - self._samples[-1].time
        while len(self._samples) > 1 and self._samples[1].time < now - self._window:
            self._samples.popleft()
        spent = self._children_seconds() if children else None
        self._samples.append(_Sample(now, self._cpu_seconds() + self._held_up, self._bytes(), spent))

    def forget(self) -> None:
        """Forget the samples, so that the time before now does not count."""
        self._samples.clear()

    @property
    def moves(self) -> bool:
        """Whether the main thread has moved in the window."""
        if len(self._samples) < 2:
            return False
        first, last = self._samples[0], self._samples[-1]
        seconds = max(last.time - first.time, 1e-3)
        busy = (last.busy - first.busy) / seconds > _BUSY_SHARE
        return busy or (last.bytes - first.bytes) / seconds > _IO_RATE or self._children_move()

    def _children_move(self) -> bool:
        known = [(one.time, one.children) for one in self._samples if one.children is not None]
        if len(known) < 2:
            return False
        (began, first), (ended, last) = known[0], known[-1]
        return (last - first) / max(ended - began, 1e-3) > _BUSY_SHARE

    def _cpu_seconds(self) -> float:
        with suppress(OSError, AttributeError, TypeError):
            return time.clock_gettime(time.pthread_getcpuclockid(self._main.ident or 0))
        return time.process_time()

    def _bytes(self) -> float:
        with suppress(OSError, ValueError):
            with open(f"/proc/self/task/{self._main.native_id}/io", encoding="ascii") as file:
                fields = dict(line.split(": ") for line in file.read().splitlines())
            return float(fields["rchar"]) + float(fields["wchar"])
        return 0.0

    def _children_seconds(self) -> float:
        total = 0.0
        with suppress(psutil.Error):
            waiting = psutil.Process().children()
            while waiting:
                child = waiting.pop()
                with suppress(psutil.Error):
                    if not self._is_rank(child.pid):
                        spent = child.cpu_times()
                        total += spent.user + spent.system
                        waiting += child.children()
        return total


class MainThreadErrors:
    """Raises an error in the main thread from another thread, also while it sleeps or waits for a lock.

    A main thread in a call of C gets it when that call returns.

    Args:
        is_critical: Returns whether the error must not be raised at a frame, since that deals with errors itself.
    """

    def __init__(self, is_critical: Callable[[FrameType], bool]) -> None:
        self._is_critical = is_critical
        self._pending: BaseException | None = None
        self._by_signal = False
        self._before: Any = None
        self._process = os.getpid()

    def install(self) -> None:
        """Begin to handle the signal by which the main thread is woken.

        Ranks: any rank, alone, from its main thread; from another thread errors come without a signal, a little later.
        """
        if threading.current_thread() is threading.main_thread() and not self._by_signal:
            self._before = signal.signal(_SIGNAL, self._woken)
            self._by_signal = True

    def remove(self) -> None:
        """Give the signal back.

        Ranks: any rank, alone, from its main thread.
        """
        if self._by_signal and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._before)
            self._by_signal = False

    def raise_soon(self, error: BaseException) -> None:
        """Raise ``error`` in the main thread.

        Ranks: any rank, alone, from any thread but the main one; returns at once.
        """
        self._pending = error
        ident = threading.main_thread().ident or 0
        if self._by_signal:
            signal.pthread_kill(ident, _SIGNAL)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(type(error)))

    def take(self) -> BaseException | None:
        """Return the error that was to be raised and has not been, once."""
        error, self._pending = self._pending, None
        return error

    def _woken(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        if self._pending is None or os.getpid() != self._process:
            return
        if any(self._is_critical(one) for one in _frames(frame)):
            return  # that code asks for the error itself
        error = self.take()
        if error is not None:
            raise error
