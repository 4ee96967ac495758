"""The guard of a run: its parts, and how its errors reach the main thread."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from lightning_lockstep.distributed.failure.propagation import FailurePropagation
from lightning_lockstep.distributed.failure.record import is_broken_collective
from lightning_lockstep.distributed.guard.rank_state import position_of_error
from lightning_lockstep.distributed.guard.records import FlightRecorder, GroupRecorders
from lightning_lockstep.distributed.guard.verify import CallVerifier
from lightning_lockstep.distributed.guard.watch import CollectiveWatch, GuardSettings
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.errors import CollectiveError, ConfigurationError, LockstepError

# -- A last word before C++ ends this process --
# gloo throws in one of its threads when a peer sends more than was expected; nobody can catch that, and
# the C++ library aborts the process. It calls a function before, which may be set.

# std::set_terminate of the C++ library that torch is linked with.
_LIBRARY, _SET = "libstdc++.so.6", "_ZSt13set_terminatePFvvE"
_Handler = ctypes.CFUNCTYPE(None)
_function: Callable[[], None] | None = None
_kept: list[object] = []  # what C++ holds a pointer to must live


def before_terminate(function: Callable[[], None] | None) -> bool:
    """Have ``function`` called, in whichever thread that is, before C++ aborts this process over an error."""
    # It may wait, and may end the process; ``None``: nothing is called any more. Returns whether that is
    # possible here.
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


# -- Raises an error in the thread that trains from another thread, also while that sleeps or waits for a lock --

# Ignored by default, so that it does no harm where no handler is installed.
_SIGNAL = signal.SIGURG


class MainThreadErrors:
    """Raises an error in the thread that trains."""

    # In a call of C it gets the error when that call returns. So it does in all that waits, if it is not the main
    # thread: Python runs handlers of signals in that one alone.

    def __init__(self) -> None:
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
        elif not _deals_with_errors(sys._current_frames().get(ident.value)):
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

    def _woken(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        if self._pending is None or os.getpid() != self._process:
            return
        if _deals_with_errors(frame) or _is_of_the_end(frame):
            return
        error = self.take()
        if error is not None:
            raise error


def _deals_with_errors(frame: FrameType | None) -> bool:
    """Return whether a frame, or what has called it, is of the failure protocol, which asks for the error itself."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("lightning_lockstep.distributed.failure"):
            return True
        frame = frame.f_back
    return False


def _is_of_the_end(frame: FrameType | None) -> bool:
    """Return whether the main thread is past its program, in a function that Python calls at exit."""
    # Python would print "Exception ignored in atexit callback" of an error that is raised there, and go on.
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return False
        frame = frame.f_back
    return True


# -- The guard of a run: which of its parts are at work, and how an error of theirs reaches the main thread

# How long the other ranks may take to say where they are when a collective has failed here [s].
_EXPLAIN_FOR = 15.0
# How long the thread may take to end [s].
_ENDS_WITHIN = 2.0


class CollectiveGuard:
    """Watches the collectives of this rank, and brings errors of the watch to the main thread."""

    def __init__(
        self, channel: SideChannel, propagation: FailurePropagation, settings: GuardSettings
    ) -> None:
        self.settings, self._propagation = settings, propagation
        self._verifier = CallVerifier() if settings.guard == "verify" else None
        self._errors = MainThreadErrors()
        self.watch = CollectiveWatch(
            channel,
            [self._verifier or FlightRecorder(), GroupRecorders()],
            settings,
            propagation,
            store_port=int(os.environ.get("MASTER_PORT") or 0),
        )
        self._thread = threading.Thread(target=self._run, name="lockstep-guard", daemon=True)

    @property
    def error(self) -> CollectiveError | None:
        """The error that all ranks raise, once there is one; its process groups cannot be used any more."""
        return self.watch.stall.error

    def start(self) -> None:
        """Begin to watch, and to verify if that is wanted; on all ranks between the same two collectives."""
        if self._verifier is not None:
            self._verifier.start()
        self.follow()
        self._thread.start()
        self._propagation.explain = self.explain
        before_terminate(self._before_terminate)

    def follow(self) -> None:
        """Take the calling thread for the one that trains, which is watched and gets the errors."""
        self._errors.install()
        self.watch.follow(threading.current_thread())

    def stop(self) -> None:
        """Stop watching and verifying; on all ranks between the same two collectives."""
        if self._verifier is not None:
            self._verifier.stop()
        self.watch.stop()
        self.watch.rank.stop(_ENDS_WITHIN)
        # One that is inside of torch when Python ends is ended there, which C++ answers with an abort.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_ENDS_WITHIN)
        self._errors.remove()
        before_terminate(None)
        if self._propagation.explain == self.explain:
            self._propagation.explain = None

    def explain(self, error: BaseException) -> BaseException | None:
        """Return the error that all ranks raise in place of one raised here, if there is a reason."""
        # In the main thread; where a collective has failed, the others are asked, for some seconds at most.
        self._errors.take()
        if isinstance(error, LockstepError):
            return None
        if self.error is None and is_broken_collective(error):
            self._ask(str(error), at=position_of_error(error), unless=lambda: self._propagation.failed)
        return self.error

    def _ask(self, raised: str, **options: Any) -> None:
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self.watch.explain(raised, _EXPLAIN_FOR, **options)

    def _run(self) -> None:
        for error in self.watch.errors():  # one at most
            self._errors.raise_soon(error)
            threading.Thread(
                target=self._end_if_stuck, args=(error,), name="lockstep-guard-end", daemon=True
            ).start()

    def _end_if_stuck(self, error: CollectiveError) -> None:
        """End this process if the main thread never gets the error, as in a call of C that does not return."""
        time.sleep(self._propagation.grace_period)
        if self._errors.take() is not None:
            self._end(error)

    def _before_terminate(self) -> None:
        """C++ is about to abort this process: let all ranks know why, if the records say so."""
        self._ask("a thread of the backend ended the process")
        if self.error is not None:
            self._end(self.error)

    def _end(self, error: CollectiveError) -> None:
        # The other ranks raise it now; those that print nothing themselves ask this one first.
        time.sleep(min(2.5, self._propagation.grace_period / 4))
        self._propagation.end_now(self._propagation.describe(error))


class _GuardOfChannel:
    """The guard of one side channel, which its fits share, and how many fits have asked for it."""

    def __init__(self, channel: SideChannel) -> None:
        self._channel, self._fits = channel, 0
        self.guard: CollectiveGuard | None = None

    def check_alike(self, settings: GuardSettings) -> None:
        """Raise unless all ranks have the same guard: one that compares would wait for one that does not."""
        self._fits += 1
        first = self._channel.claim(f"guard/{self._fits}", settings.guard)
        if first != settings.guard:
            raise ConfigurationError(
                f"guard={settings.guard!r} on rank {self._channel.rank}, and {first!r} on another rank: expected the"
                " same on all. Give every rank the same strategy, and the same LOCKSTEP_DEBUG in its environment."
            )


def guard_on(
    channel: SideChannel, propagation: FailurePropagation, settings: GuardSettings
) -> CollectiveGuard | None:
    """Return the guard of a run, at work, or ``None``; for every rank, in the thread that trains."""
    kept = channel.get_or_create(_GuardOfChannel)
    kept.check_alike(settings)
    if kept.guard is not None and kept.guard.settings == settings:
        kept.guard.follow()
        return kept.guard
    if kept.guard is not None:
        kept.guard.stop()
        kept.guard = None
    if settings.guard == "off" or channel.world_size == 1:
        return None
    kept.guard = CollectiveGuard(channel, propagation, settings)
    kept.guard.start()
    # A rank that has come to its end answers nothing any more, and is named by what the channel knows of it.
    channel.before_close(kept.guard.stop)
    return kept.guard
