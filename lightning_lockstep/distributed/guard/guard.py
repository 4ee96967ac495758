"""The guard: a thread that watches the collectives of this rank, and has rank 0 find out why one does not complete."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from lightning_lockstep._settings import Faults, debug
from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.failure.propagation import FailurePropagation
from lightning_lockstep.distributed.guard.diagnosis import ANSWERS_WITHIN, StallDiagnosis
from lightning_lockstep.distributed.guard.observer import RankObserver
from lightning_lockstep.distributed.guard.rank_state import (
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
    # watch: find out why a collective does not complete.
    guard: Literal["off", "watch", "verify"] = "watch"  # verify: also compare before each collective
    stall_timeout: float = 60.0  # how long a collective may take before all ranks say where they are [s]

    def __post_init__(self) -> None:
        faults = Faults()
        faults.fields(self)
        self.check(faults)
        faults.raise_all()
        if self.guard == "watch" and debug():
            object.__setattr__(self, "guard", "verify")

    def check(self, faults: Faults) -> None:
        """Add to ``faults`` what is wrong; a subclass with further settings checks those too."""
        faults.number("stall_timeout", self.stall_timeout, what="seconds", above=0, such_as=60)


# -- Watches this rank's collectives, and asks about one that does not complete --
#
# Nothing is sent while collectives complete in time. The guard has its own thread, because that which trains may wait.

_log = logging.getLogger(__name__)
# The time between two looks is this part of the stall timeout, within these limits [s].
_PART, _OFTEN, _SELDOM = 0.1, 0.05, 1.0
# The longest time between the two looks that tell whether a rank moves [s].
_MOVEMENT = 10.0
# If a sleep of the guard takes this much longer than planned [s], the process was stopped meanwhile.
_STOPPED = 2.0
# How long this rank waits for an answer of rank 0 after a collective has failed here [s]: rank 0 may still be looking
# for another reason, and then looks twice because of the error.
_EXPLAIN_FOR = 3 * ANSWERS_WITHIN + 2.0
# How long the guard's thread may take to end [s].
_ENDS_WITHIN = 2.0


class CollectiveGuard:
    """Watches this rank's collectives from now on; make and stop it on all ranks between the same two collectives."""

    def __init__(self, channel: SideChannel, propagation: FailurePropagation, settings: GuardSettings) -> None:
        self.settings, self._channel, self._propagation = settings, channel, propagation
        self._verifier = CallVerifier() if settings.guard == "verify" else None
        # Rank 0 looks at all ranks this long before the stall timeout [s], and again at it: have they moved?
        window = min(_MOVEMENT, settings.stall_timeout / 2)
        self.rank = RankObserver(channel, self._verifier or FlightRecorder(), window=window + ANSWERS_WITHIN)
        self._to_do: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stall = StallDiagnosis(
            channel,
            self.rank,
            propagation.attempt,
            self._to_do,
            stall_timeout=settings.stall_timeout,
            window=window,
            verifies=self._verifier is not None,
        )
        self._asks_after = settings.stall_timeout - window  # then, and again after each such time [s]
        self._period = min(max(settings.stall_timeout * _PART, _OFTEN), _SELDOM)  # between two looks [s]
        # For each incomplete collective of this rank: since when it waits, and when it is to ask rank 0.
        self._waits: dict[Outstanding, tuple[float, float]] = {}
        self._thread = threading.Thread(target=self._run, name="lockstep-guard", daemon=True)
        if self._verifier is not None:
            self._verifier.start()
        self.follow()
        self._thread.start()
        self._propagation.guard = self
        before_terminate(self._before_terminate)

    def follow(self) -> None:
        """Watch the calling thread as the one that trains."""
        self.rank.trains, self.rank.raised_at = threading.current_thread(), None

    def stop(self) -> None:
        if self._propagation.guard is not self:
            return  # it was stopped before
        self._propagation.guard = None
        if self._verifier is not None:
            self._verifier.stop()
        self._stall.close()
        self._to_do.put(None)
        # If the guard's thread is inside torch when Python exits, C++ aborts the process.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_ENDS_WITHIN)
        before_terminate(None)

    def explain(self, error: BaseException) -> None:
        """Ask why a collective has failed here, and wait some seconds for the answer, which comes as a failure."""
        self._ask(str(error), position_of_error(error))

    def _before_terminate(self) -> None:
        """Tell all ranks why C++ is about to abort this process, if rank 0 finds out why."""
        self._ask("a thread of the backend ended the process", None)
        record = self._propagation.attempt.record
        if record is not None and record.kind == "collective":
            self._channel.flush()  # or the others might notice the end of rank 0 before they know why
            self._propagation.end_now(record)

    def _ask(self, raised: str, at: Position | None) -> None:
        """Ask rank 0 why the backend has raised an error here, and wait for a failure or an answer without one."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            return
        with self._channel.news:
            before, self.rank.raised_at = self._stall.answers, at
            self._to_do.put(lambda: self._stall.request(next(iter(self.rank.outstanding()), None), 0.0, raised))
            self._channel.wait_for(
                lambda: self._stall.answers > before or self._propagation.attempt.has_failure,
                _EXPLAIN_FOR,
                stops=False,
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
            if time.monotonic() - began > planned + _STOPPED:  # the process was stopped, perhaps all of them
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
        """Return the time until the next look [s], which comes no later than the next request is due."""
        if self._stall.is_busy:
            return min(self._period, _PART)
        due = min((asks_at for _, asks_at in self._waits.values()), default=float("inf"))
        return max(min(self._period, due - time.monotonic()), _OFTEN)

    def _look(self) -> None:
        if self._propagation.attempt.has_failure:
            return
        now, waits = time.monotonic(), self._waits
        # The flight recorder reports a call once it has seen it at two looks, so the wait began a look ago.
        new = now - self._period, now - self._period + self._asks_after
        self._waits = {one: waits.get(one, new) for one in self.rank.outstanding()}
        for one, (since, asks_at) in list(self._waits.items()):
            if asks_at <= now:
                self._waits[one] = since, now + self._asks_after
                self._stall.request(one, now - since)


def guard_on(
    channel: SideChannel, propagation: FailurePropagation, settings: GuardSettings, *, of_ranks: Sequence[str]
) -> CollectiveGuard | None:
    """Return the guard of a run, started, or ``None`` if it is off; every rank calls this in the thread that trains."""
    if len(set(of_ranks)) > 1:  # a rank that compares would wait for one that does not
        ranks_with = {one: [rank for rank, guard in enumerate(of_ranks) if guard == one] for one in of_ranks}
        given = " and ".join(f"{one!r} on {ranks_in_words(ranks)}" for one, ranks in ranks_with.items())
        raise ConfigurationError(
            f"guard={given}: expected the same on all ranks. Give every rank the same strategy, and the same"
            " LOCKSTEP_DEBUG in its environment."
        )
    guard: CollectiveGuard | None = propagation.guard  # of an earlier fit over this channel
    if guard is not None and guard.settings == settings:
        guard.follow()
        return guard
    if guard is not None:
        guard.stop()
    if settings.guard == "off" or channel.world_size == 1:
        return None
    guard = CollectiveGuard(channel, propagation, settings)
    channel.at_close(guard.stop)
    return guard


# -- A diagnosis before C++ aborts this process --
# If a peer sends more than was expected, gloo throws in one of its own threads, where nobody can catch it. The C++
# library then calls its terminate handler, which this part replaces, and aborts the process.

# std::set_terminate of the C++ library that torch is linked with.
_LIBRARY, _SET = "libstdc++.so.6", "_ZSt13set_terminatePFvvE"
_Handler = ctypes.CFUNCTYPE(None)
_function: Callable[[], None] | None = None


def before_terminate(function: Callable[[], None] | None) -> None:
    """Call ``function``, in the thread that threw, before C++ aborts this process; with ``None`` call nothing."""
    # The function may wait, and may end the process.
    global _function
    _function = function
    _install()


@functools.cache  # keeps alive what C++ holds a pointer to
def _install() -> object:
    try:
        set_terminate = getattr(ctypes.CDLL(_LIBRARY), _SET)
    except (OSError, AttributeError):  # this torch is linked with another C++ library
        return None
    set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
    process = os.getpid()

    def handler() -> None:
        if _function is not None and os.getpid() == process:
            with suppress(Exception):
                _function()
        _Handler(before)()

    pointer = _Handler(handler)
    before = set_terminate(ctypes.cast(pointer, ctypes.c_void_p))
    return pointer
