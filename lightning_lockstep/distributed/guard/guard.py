"""The guard of a run: a thread that watches the collectives of this rank, and how its errors reach the main thread."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from lightning_lockstep._settings import Faults
from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.failure.propagation import FailurePropagation
from lightning_lockstep.distributed.guard.diagnosis import ANSWERS_WITHIN, StallDiagnosis
from lightning_lockstep.distributed.guard.observer import RankObserver
from lightning_lockstep.distributed.guard.rank_state import (
    DiagnosisRequest,
    FlightRecorder,
    Outstanding,
    Position,
    position_of_error,
)
from lightning_lockstep.distributed.guard.verify import CallVerifier
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.errors import ConfigurationError

# -- What a user may set on the collective guard --


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Settings of the guard of a run."""

    # watch: find out why a collective does not complete.
    guard: Literal["off", "watch", "verify"] = "watch"  # verify: also compare before each collective
    stall_timeout: float = 60.0  # how long one may take before the ranks compare where they are [s]

    def __post_init__(self) -> None:
        faults = Faults()
        faults.fields(self)
        self.check(faults)
        faults.raise_all()

    def check(self, faults: Faults) -> None:
        """Add to ``faults`` what is wrong; a class with further settings checks those too."""
        faults.number("stall_timeout", self.stall_timeout, what="seconds", above=0, such_as=60)


# -- Watches this rank's collectives, and asks about one that does not complete --
#
# Nothing is sent while collectives complete in time. What the guard looks at, it does on a separate thread, so
# that it works while the main thread waits in a collective, in C++.

_log = logging.getLogger(__name__)
# How often it looks, as a part of the stall timeout, within these limits [s].
_PART, _OFTEN, _SELDOM = 0.1, 0.05, 1.0
# For how long movements of the ranks are looked at, at most [s].
_MOVEMENT = 10.0
# A longer sleep than this much more than planned [s] means that this process was stopped.
_STOPPED = 2.0
# How long the other ranks may take to say where they are when a collective has failed here [s].
_EXPLAIN_FOR = 15.0
# How long the thread may take to end [s].
_ENDS_WITHIN = 2.0


class CollectiveGuard:
    """Watches the collectives of this rank, and brings errors of a diagnosis to the thread that trains."""

    def __init__(
        self, channel: SideChannel, propagation: FailurePropagation, settings: GuardSettings
    ) -> None:
        self.settings, self._channel, self._propagation = settings, channel, propagation
        self._verifier = CallVerifier() if settings.guard == "verify" else None
        self._errors = MainThreadErrors()
        # The ranks are looked at so long before a wait is too long [s], and again then: whether they have moved.
        window = min(_MOVEMENT, settings.stall_timeout / 2)
        self.rank = RankObserver(
            channel,
            self._verifier or FlightRecorder(),
            window=window + ANSWERS_WITHIN,
            store_port=int(os.environ.get("MASTER_PORT") or 0),
        )
        self._to_do: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stall = StallDiagnosis(
            channel,
            self.rank,
            propagation,
            self._to_do,
            stall_timeout=settings.stall_timeout,
            window=window,
            verifies=self._verifier is not None,
        )
        self._asks_after = settings.stall_timeout - window  # and again each time that this has passed [s]
        self._period = min(max(settings.stall_timeout * _PART, _OFTEN), _SELDOM)  # of its looks [s]
        # Since when this rank waits in each of its incomplete collectives, and when it asks about it.
        self._waits: dict[Outstanding, tuple[float, float]] = {}
        self._thread = threading.Thread(target=self._run, name="lockstep-guard", daemon=True)

    def start(self) -> None:
        """Begin to watch, and to verify if that is wanted; on all ranks between the same two collectives."""
        if self._verifier is not None:
            self._verifier.start()
        self.follow()
        self._thread.start()
        self._propagation.explain, self._propagation.interrupt = self.explain, self._errors.raise_soon
        before_terminate(self._before_terminate)

    def follow(self) -> None:
        """Take the calling thread for the one that trains, which is watched and gets the errors."""
        self._errors.install()
        self.rank.trains, self.rank.raised_at = threading.current_thread(), None

    def stop(self) -> None:
        """Stop watching and verifying; on all ranks between the same two collectives."""
        if self._verifier is not None:
            self._verifier.stop()
        self._stall.close()
        self._to_do.put(None)
        # One that is inside of torch when Python ends is ended there, which C++ answers with an abort.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_ENDS_WITHIN)
        self._errors.remove()
        before_terminate(None)
        if self._propagation.explain == self.explain:
            self._propagation.explain = self._propagation.interrupt = None

    def explain(self, error: BaseException) -> None:
        """Ask why a collective has failed here, for some seconds at most; the answer comes as a failure."""
        self._ask(str(error), position_of_error(error))

    def _before_terminate(self) -> None:
        """C++ is about to abort this process: let all ranks know why, if the records say so."""
        self._ask("a thread of the backend ended the process", None)
        record = self._propagation.record
        if record is not None and record.kind == "collective":
            self._channel.flush()  # of rank 0, whose end the others would else notice before they know why
            self._propagation.end_now(record)

    def _ask(self, raised: str, at: Position | None) -> None:
        """Wait until rank 0 has said why the backend has raised an error here: a failure, or that it does not know."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            return

        def ask() -> None:
            outstanding = next(iter(self.rank.outstanding()), None)
            self._request(outstanding, 0.0, raised)

        with self._propagation.news:
            before, self.rank.raised_at = self._stall.answers, at
            self._to_do.put(ask)
            self._channel.wait_for(
                self._propagation.news,
                lambda: self._stall.answers > before or self._propagation.failed,
                _EXPLAIN_FOR,
            )

    def _request(self, outstanding: Outstanding | None, seconds: float, raised: str = "") -> None:
        self._stall.request(
            DiagnosisRequest(rank=self._channel.rank, outstanding=outstanding, seconds=seconds, raised=raised)
        )

    def _run(self) -> None:
        while True:
            planned, began = self._until_next_look(), time.monotonic()
            try:
                to_do = self._to_do.get(timeout=planned)
            except queue.Empty:
                to_do = self._look
            if to_do is None:
                return
            if time.monotonic() - began > planned + _STOPPED:  # this process was stopped, perhaps all of them
                self._waits.clear()
                self._stall.forget()
                self.rank.activity.forget()
            try:
                to_do()
                self._stall.work()
            except Exception:
                if self._channel.usable:  # the watch must not end because of one error
                    _log.exception("the watch of the collectives failed")

    def _until_next_look(self) -> float:
        """Return how long until the next look [s]: not beyond the moment at which a wait is to be asked about."""
        if self._stall.is_busy:
            return min(self._period, _PART)
        due = min((asks_at for _, asks_at in self._waits.values()), default=float("inf"))
        return max(min(self._period, due - time.monotonic()), _OFTEN)

    def _look(self) -> None:
        if self._propagation.failed:
            return
        now, waits = time.monotonic(), self._waits
        # A recorder tells of a call that it has seen at two looks.
        new = now - self._period, now - self._period + self._asks_after
        self._waits = {one: waits.get(one, new) for one in self.rank.outstanding()}
        for one, (since, asks_at) in list(self._waits.items()):
            if asks_at <= now:
                self._waits[one] = since, now + self._asks_after
                self._request(one, now - since)


def guard_on(
    channel: SideChannel, propagation: FailurePropagation, settings: GuardSettings, *, of_ranks: Sequence[str]
) -> CollectiveGuard | None:
    """Return the guard of a run, at work, or ``None``; for every rank, in the thread that trains."""
    if len(set(of_ranks)) > 1:  # one that compares would wait for one that does not
        ranks_with = {one: [rank for rank, guard in enumerate(of_ranks) if guard == one] for one in of_ranks}
        given = " and ".join(f"{one!r} on {ranks_in_words(ranks)}" for one, ranks in ranks_with.items())
        raise ConfigurationError(
            f"guard={given}: expected the same on all ranks. Give every rank the same strategy, and the same"
            " LOCKSTEP_DEBUG in its environment."
        )
    kept = channel.get_or_create(_GuardOfChannel)
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
    channel.at_close(kept.guard.stop)
    return kept.guard


class _GuardOfChannel:
    """The guard of one side channel, which its fits share."""

    def __init__(self, channel: SideChannel) -> None:
        self.guard: CollectiveGuard | None = None


# -- A last word before C++ ends this process --
# gloo throws in one of its threads when a peer sends more than was expected; nobody can catch that, and
# the C++ library aborts the process. It calls a function before, which may be set.

# std::set_terminate of the C++ library that torch is linked with.
_LIBRARY, _SET = "libstdc++.so.6", "_ZSt13set_terminatePFvvE"
_Handler = ctypes.CFUNCTYPE(None)
_function: Callable[[], None] | None = None
_kept: list[object] = []  # what C++ holds a pointer to must live


def before_terminate(function: Callable[[], None] | None) -> None:
    """Have ``function`` called, in whichever thread that is, before C++ aborts this process; ``None``: no more."""
    # It may wait, and may end the process.
    global _function
    _function = function
    if function is not None and not _kept:
        _install()


def _install() -> None:
    try:
        set_terminate = getattr(ctypes.CDLL(_LIBRARY), _SET)
    except (OSError, AttributeError):  # another C++ library
        return
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
