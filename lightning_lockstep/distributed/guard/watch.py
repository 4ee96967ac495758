"""The thread that watches: which collective has been outstanding for too long, and what is done then."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_lockstep._settings import Faults
from lightning_lockstep._text import say
from lightning_lockstep.distributed.c10d_operators import OPERATIONS
from lightning_lockstep.distributed.failure.propagation import FailurePropagation
from lightning_lockstep.distributed.guard.diagnosis import ANSWERS_WITHIN, StallDiagnosis
from lightning_lockstep.distributed.guard.rank_state import (
    DiagnosisRequest,
    Position,
    RankObserver,
    RankState,
)
from lightning_lockstep.distributed.guard.records import CallRecorder, Outstanding
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.errors import CollectiveError

# -- What a user may set on the collective guard --


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Settings of the guard of a run."""

    # watch: find out why a collective does not complete.
    guard: Literal["off", "watch", "verify"] = "watch"  # verify: also compare before each collective
    stall_timeout: float = 60.0  # how long one may take before the ranks compare where they are [s]

    def __post_init__(self) -> None:
        faults = Faults()
        self.check(faults)
        faults.raise_all()

    def check(self, faults: Faults) -> None:
        """Add to ``faults`` what is wrong; a class with further settings checks those too."""
        faults.choice("guard", self.guard, ("off", "watch", "verify"))
        faults.number("stall_timeout", self.stall_timeout, what="seconds", above=0, such_as=60)


# -- How long this rank has waited in each of its incomplete collectives, and when it asks about one --


class Waits:
    """The waits of this rank."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout  # when a wait is asked about, and after how long again [s]
        self._since: dict[Outstanding, float] = {}
        self._next_question: dict[Outstanding, float] = {}

    def update(
        self,
        outstanding: Sequence[Outstanding],
        now: float,
        ages: Callable[[], Mapping[Outstanding, float]],  # how long ago each was called [s]
    ) -> None:
        """Take note of what is incomplete now."""
        known = ages() if any(one not in self._since for one in outstanding) else {}
        self._since = {one: self._since.get(one, now - known.get(one, 0.0)) for one in outstanding}
        self._next_question = {one: at for one, at in self._next_question.items() if one in self._since}

    def put_off(self, seconds: float) -> None:
        """Leave out of all waits a time in which this process was stopped [s]."""
        self._since = {one: since + seconds for one, since in self._since.items()}

    def due(self, now: float) -> list[tuple[Outstanding, float]]:
        """Return what is to be asked about now, each with how long this rank has waited [s]; once in each timeout."""
        due = [one for one in self._since if self._due_at(one) <= now]
        self._next_question |= dict.fromkeys(due, now + self._timeout)
        return [(one, now - self._since[one]) for one in due]

    def until_due(self, now: float) -> float:
        """Return how long until something is to be asked about [s]; infinity where nothing waits."""
        return min((self._due_at(one) - now for one in self._since), default=float("inf"))

    def _due_at(self, one: Outstanding) -> float:
        return max(self._since[one] + self._timeout, self._next_question.get(one, 0.0))


# -- Watches this rank's collectives, and asks about one that does not complete --
#
# Nothing is sent while collectives complete in time. Everything here runs on a separate thread, so that
# it works while the main thread waits in a collective, in C++.

_log = logging.getLogger(__name__)
# Functions of torch.distributed whose collectives torch's flight recorder sees.
_COLLECTIVES = {
    *OPERATIONS.values(),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
} - {"send", "recv", "monitored_barrier"}
# How often it looks, as a part of the stall timeout, within these limits [s].
_PART, _OFTEN, _SELDOM = 0.1, 0.05, 1.0
# For how long movements of the ranks are looked at, at most [s].
_MOVEMENT = 10.0
# A longer sleep than this much more than planned [s] means that this process was stopped.
_STOPPED = 2.0


class CollectiveWatch:
    """Looks at the collectives of this rank, and tells of the error that all ranks are to raise."""

    def __init__(
        self,
        channel: SideChannel,
        recorders: Sequence[CallRecorder],
        settings: GuardSettings,
        propagation: FailurePropagation,
        *,
        store_port: int = 0,  # of the store at which the ranks have met
    ) -> None:
        self.channel, self.settings = channel, settings
        # The ranks are looked at so long before a wait is too long [s], and again then: whether they have moved.
        self._window = min(_MOVEMENT, settings.stall_timeout / 2)
        self.rank = RankObserver(
            channel,
            recorders,
            window=self._window + ANSWERS_WITHIN,
            store_port=store_port,
        )
        self._to_do: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.stall = StallDiagnosis(
            channel,
            self.rank,
            propagation,
            self._to_do,
            stall_timeout=settings.stall_timeout,
            window=self._window,
            verifies=settings.guard == "verify",
        )
        self._waits = Waits(settings.stall_timeout - self._window)
        self._sees, self._unseen = False, Position("", ())

    def follow(self, thread: threading.Thread) -> None:
        """Say which thread trains; by default it is the one that has made this object."""
        self.rank.trains, self.rank.raised_at = thread, None

    def state(self) -> RankState:
        """Return where this rank is."""
        return self.rank.state()

    def stop(self) -> None:
        """End the thread that goes through :meth:`errors`; nothing more is heard from other ranks."""
        self.stall.close()
        self._to_do.put(None)

    def explain(
        self,
        raised: str,
        timeout: float,  # longest wait for the other ranks [s]
        *,
        at: Position | None = None,  # by default where the main thread is
        unless: Callable[[], bool] = lambda: False,  # the reason is known otherwise: ends the wait
    ) -> CollectiveError | None:
        """Return the error that all ranks raise, if there is a reason: the backend has raised one here."""

        def ask() -> None:
            outstanding = next(iter(self.rank.outstanding()), None)
            self.stall.request(
                DiagnosisRequest(rank=self.channel.rank, outstanding=outstanding, seconds=0.0, raised=raised)
            )

        stall = self.stall
        with stall.answered:
            before, self.rank.raised_at = stall.answers, at
            self._to_do.put(ask)
            self.channel.wait_for(
                stall.answered,
                lambda: stall.answers > before or stall.error is not None or unless(),
                timeout,
            )
        return stall.error

    def errors(self) -> Iterator[CollectiveError]:
        """Watch until :meth:`stop`; give the error of all ranks, if there is one, before waits are ended by it."""
        has_given = False
        while True:
            planned, began = self._until_next_look(), time.monotonic()
            try:
                to_do = self._to_do.get(timeout=planned)
            except queue.Empty:
                to_do = self._look
            if to_do is None:
                return
            slept = time.monotonic() - began
            if slept > planned + _STOPPED:  # this process was stopped meanwhile, perhaps all of them
                self._waits.put_off(slept)
                self.stall.forget()
                self.rank.activity.forget()
            try:
                to_do()
                self.stall.work()
            except Exception:
                if self.channel.usable:  # the watch must not end because of one error
                    _log.exception("the watch of the collectives failed")
            if self.stall.error is not None and not has_given:
                has_given = True
                yield self.stall.error
                self.stall.end_waits()

    @property
    def _period(self) -> float:
        """How often it looks [s]."""
        return min(max(self.settings.stall_timeout * _PART, _OFTEN), _SELDOM)

    def _until_next_look(self) -> float:
        """Return how long until the next look [s]: not beyond the moment at which a wait has become too long."""
        if self.stall.is_busy:
            return min(self._period, _PART)
        return max(min(self._period, self._waits.until_due(time.monotonic())), _OFTEN)

    def _look(self) -> None:
        if self.stall.error is not None:
            return
        now = time.monotonic()
        self._sees = self._sees or self._has_seen()
        self._waits.update(self.rank.outstanding(), now, lambda: self.rank.ages(2 * self._period))
        for one, waited in self._waits.due(now):
            self.stall.request(DiagnosisRequest(rank=self.channel.rank, outstanding=one, seconds=waited))

    def _has_seen(self) -> bool:
        """Return whether it is settled that the recorders see this rank's collectives; says so where they do not."""
        if self.rank.is_recording:
            return True
        before, self._unseen = self._unseen, self.rank.position
        waits = self._unseen == before and self._unseen.function in _COLLECTIVES
        if waits and self.channel.rank == 0:
            size = os.environ.get("TORCH_FR_BUFFER_SIZE", "not set")
            say(
                f"lightning-lockstep: guard='watch' does not see the {self._unseen.function} that rank 0 waits in:"
                f" torch's flight recorder has no collective (TORCH_FR_BUFFER_SIZE={size}, torch {torch.__version__})."
                " It could not say why one hangs: unset that variable, or use guard='verify', which needs no recorder."
            )
        return waits
