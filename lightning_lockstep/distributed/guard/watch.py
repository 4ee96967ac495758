"""The thread that watches: which collective has been outstanding for too long, and what is done then."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_lockstep._settings import Faults
from lightning_lockstep._text import say
from lightning_lockstep.distributed.c10d_operators import OPERATIONS
from lightning_lockstep.distributed.guard.activity import (
    Activity,
    abort_devices,
    connections,
    end_connections,
)
from lightning_lockstep.distributed.guard.inquiry import Answer, Inquiries, Silence, SilentRanks
from lightning_lockstep.distributed.guard.rank_state import (
    MESSAGES,
    WAIT,
    Position,
    Question,
    RankState,
    position,
    waits_for_import,
)
from lightning_lockstep.distributed.guard.records import CallRecorder, Outstanding, RecordedCall, group_titles
from lightning_lockstep.distributed.guard.verdict import Verdict
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.errors import CollectiveError

# -- What a user may set on the collective guard --


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Settings of the guard of a run."""

    # watch: find out why a collective does not complete.
    guard: Literal["off", "watch", "verify"] = "watch"  # verify: also compare before each collective
    stall_timeout: float = 60.0  # how long one may take before the ranks compare where they are [s]
    guard_history: int = 0  # how many of the last calls of each rank a report lists

    def __post_init__(self) -> None:
        faults = Faults()
        self.check(faults)
        faults.raise_all()

    def check(self, faults: Faults) -> None:
        """Add to ``faults`` what is wrong; a class with further settings checks those too."""
        faults.choice("guard", self.guard, ("off", "watch", "verify"))
        faults.number("stall_timeout", self.stall_timeout, what="seconds", above=0, such_as=60)
        faults.whole("guard_history", self.guard_history, least=0)


# -- How long this rank has waited in each of its incomplete collectives, and when it asks about one --


class Waits:
    """The waits of this rank; ``None`` stands for a send or receive."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout  # when a wait is asked about, and after how long again [s]
        self._since: dict[Outstanding | None, float] = {}
        self._next_question: dict[Outstanding | None, float] = {}

    def update(
        self,
        outstanding: Sequence[Outstanding | None],
        now: float,
        ages: Callable[[], Mapping[Outstanding | None, float]],  # how long ago each was called [s]
    ) -> None:
        """Take note of what is incomplete now."""
        known = ages() if any(one not in self._since for one in outstanding) else {}
        self._since = {one: self._since.get(one, now - known.get(one, 0.0)) for one in outstanding}
        self._next_question = {one: at for one, at in self._next_question.items() if one in self._since}

    def put_off(self, seconds: float) -> None:
        """Leave out of all waits a time in which this process was stopped [s]."""
        self._since = {one: since + seconds for one, since in self._since.items()}

    def longest(self, now: float) -> float:
        """Return the longest wait [s]."""
        return max((now - since for since in self._since.values()), default=0.0)

    def due(self, now: float) -> list[tuple[Outstanding | None, float]]:
        """Return what is to be asked about now, each with how long this rank has waited [s]; once in each timeout."""
        due = [one for one in self._since if self._due_at(one) <= now]
        self._next_question |= dict.fromkeys(due, now + self._timeout)
        return [(one, now - self._since[one]) for one in due]

    def until_due(self, now: float) -> float:
        """Return how long until something is to be asked about [s]; infinity where nothing waits."""
        return min((self._due_at(one) - now for one in self._since), default=float("inf"))

    def _due_at(self, one: Outstanding | None) -> float:
        return max(self._since[one] + self._timeout, self._next_question.get(one, 0.0))


# -- Watches this rank's collectives: asks the others when one does not complete, and raises what comes of
# it
#
# Nothing is sent while collectives complete in time. Everything here runs on a thread of its own, so that
# it works while the main thread waits in a collective, in C++.

_log = logging.getLogger(__name__)
# Calls of each rank that are compared.
_COMPARED = 100
# Functions of torch.distributed whose collectives torch's flight recorder sees.
_COLLECTIVES = {
    *OPERATIONS.values(),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
} - {"send", "recv", "monitored_barrier"}
# How often it looks, as a part of the stall timeout, within these limits [s].
_PART, _OFTEN, _SELDOM = 0.1, 0.05, 1.0
# How far back the program's movements count, at most [s].
_MOVEMENT = 10.0
# How long the thread may take to end [s].
_ENDS_WITHIN = 2.0
# A longer time between two looks than this much more than planned [s] means that this process was stopped.
_STOPPED = 2.0


class CollectiveWatch:
    def __init__(
        self,
        channel: SideChannel,
        recorders: Sequence[CallRecorder],
        settings: GuardSettings,
        *,
        messages: Callable[[], Sequence[RecordedCall]] = tuple,  # not known to be complete
        # Once, on the guard's thread: the error of all ranks, before the waits of this one are ended.
        conclude: Callable[[CollectiveError], None],
        # On the one rank that has asked the others: an error, and what each has said.
        report: Callable[[Verdict, Mapping[int, RankState]], None],
        has_failed: Callable[[], bool] = lambda: False,  # a rank, which explains what it no longer does
        has_raised: Callable[[int], bool] = lambda rank: False,  # an error that may be one of all ranks
        store_port: int = 0,  # of the store at which the ranks have met
    ) -> None:
        self.channel, self.settings, self._recorders = channel, settings, tuple(recorders)
        self._conclude, self._report, self._store_port = conclude, report, store_port
        self._messages, self._open_messages = messages, tuple[RecordedCall, ...]()
        self._has_failed, self._has_raised = has_failed, has_raised
        self.error: CollectiveError | None = None  # that all ranks raise, once there is one
        self._waits = Waits(settings.stall_timeout)
        self._raised_at: Position | None = None
        self._prepares = self._knows_sites = self._concluded = False
        self._sees, self._unseen = False, Position("", ())
        self._looked = time.monotonic()
        self._trains = threading.current_thread()
        window = min(_MOVEMENT, settings.stall_timeout / 2)
        self._activity = Activity(window, self._is_rank, ports=(channel.port, store_port))
        self._silent = SilentRanks(channel)
        self._to_do: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answered = threading.Condition()
        self._answers = 0
        self._inquiries = Inquiries(
            channel, self, stall_timeout=settings.stall_timeout, history=settings.guard_history
        )
        self._remove = channel.on("guard/soon", lambda message: self._prepare())
        self._thread = threading.Thread(target=self._run, name="lockstep-guard", daemon=True)
        self._sites: threading.Thread | None = None

    def start(self) -> None:
        self._thread.start()

    def follow(self, thread: threading.Thread) -> None:
        """Say which thread trains; by default it is the one that has made this object."""
        self._trains = thread
        self._to_do.put(lambda: self._activity.follow(thread))

    def stop(self) -> None:
        """Stop watching, and wait a moment until its threads have noticed."""
        # One that is inside of torch when Python ends is ended there, which C++ answers with an abort.
        self._inquiries.close()
        self._remove()
        self._to_do.put(None)
        for thread in (self._thread, self._sites):
            if thread is not None and thread.is_alive() and threading.current_thread() is not thread:
                thread.join(_ENDS_WITHIN)

    def explain(
        self,
        raised: str,
        timeout: float,  # longest wait for the other ranks [s]
        *,
        at: Position | None = None,  # by default where the main thread is
        unless: Callable[[], bool] = lambda: False,  # the reason is known otherwise: ends the wait
    ) -> CollectiveError | None:
        """Return the error that all ranks raise, if there is a reason: the backend has raised one here."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            return self.error
        with self._answered:
            before, self._raised_at = self._answers, at
            self._to_do.put(lambda: self._ask_about(raised))
            self.channel.wait_for(
                self._answered,
                lambda: self._answers > before or self.error is not None or unless(),
                timeout,
                needs_main=False,  # the next rank collects
            )
        return self.error

    def state(self, sites: bool = False) -> RankState:
        """Return where this rank is; with all call sites, if ``sites``, which takes seconds at first."""
        self._activity.look(closely=self._prepares, held_up=self._holds_up())
        place = self._raised_at or position(self._trains)
        awaited = [one.call for one in self._messages()] if place.function == WAIT else []
        calls = [
            call for recorder in self._recorders for call in recorder.calls(sites=sites or self._knows_sites)
        ]
        return RankState(
            rank=self.channel.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            groups=dict(group_titles().values()),
            outstanding=tuple(self._outstanding()),
            calls=tuple(calls[-_COMPARED:]),
            seconds_since_call=time.time() - max(call.started for call in calls) if calls else None,
            position=place,
            awaited=tuple(awaited),
            raised=self._raised_at is not None,
            moves=self._activity.moves,
            transfers=self._activity.transfers,
            connections=tuple(connections()),
            ports=(self.channel.port, self._store_port),
        )

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        period = min(max(self.settings.stall_timeout * _PART, _OFTEN), _SELDOM)
        while True:
            try:
                to_do = self._to_do.get(timeout=self._until_next_look(period))
            except queue.Empty:
                to_do = self._look
            if to_do is None:
                return
            try:
                to_do()
                self._inquiries.work()
            except Exception:
                if self.channel.usable:  # the watch must not end because of one fault
                    _log.exception("the watch of the collectives failed")

    def _until_next_look(self, period: float) -> float:
        """Return how long until the next look [s]: not beyond the moment at which a wait has become too long."""
        if self._inquiries.is_busy:
            return min(period, _PART)
        return max(min(period, self._waits.until_due(time.monotonic())), _OFTEN)

    def _look(self) -> None:
        if self.error is not None:
            return
        now = time.monotonic()
        before, self._looked = self._looked, now
        lost = now - before - _SELDOM - _STOPPED
        if lost > 0:  # this process was stopped meanwhile, perhaps all of them
            self._waits.put_off(lost)
            self._activity.forget()
        self._activity.look(closely=self._prepares, held_up=self._holds_up())
        self._sees = self._sees or self._has_seen()
        waits: list[Outstanding | None] = list(self._outstanding())
        is_in_message = self._is_in_same_message()
        if not waits and is_in_message:
            waits = [None]
        self._waits.update(waits, now, lambda: self._ages(2 * min(now - before, _SELDOM)))
        if self._waits.longest(now) > self.settings.stall_timeout / 2 and not self._prepares:
            self.channel.post("guard/soon", to=0)
            self._prepare()
        for one, waited in self._waits.due(now):
            self._inquiries.ask(Question(rank=self.channel.rank, outstanding=one, seconds=waited))

    def _is_in_same_message(self) -> bool:
        """Return whether the main thread is in a send or receive, and has been in no other since the last look."""
        before, self._open_messages = self._open_messages, tuple(self._messages())
        function = position(self._trains).function
        is_in_one = function in MESSAGES or (function == WAIT and bool(self._open_messages))
        return is_in_one and before == self._open_messages

    def _ages(self, longest: float) -> dict[Outstanding | None, float]:
        """Return how long ago each incomplete collective was called [s], at most ``longest`` whatever the clock did."""
        now = time.time()
        calls = (one for recorder in self._recorders for one in recorder.calls(sites=False) if not one.done)
        return {
            Outstanding(one.call.group, one.call.number): min(max(now - one.started, 0.0), longest)
            for one in calls
        }

    def _has_seen(self) -> bool:
        """Return whether it is settled that the recorders see this rank's collectives; says so where they do not."""
        if any(recorder.is_recording for recorder in self._recorders):
            return True
        before, self._unseen = self._unseen, position(self._trains)
        waits = self._unseen == before and self._unseen.function in _COLLECTIVES
        if waits and self.channel.rank == 0:
            size = os.environ.get("TORCH_FR_BUFFER_SIZE", "not set")
            say(
                f"lightning-lockstep: guard='watch' does not see the {self._unseen.function} that rank 0 waits in:"
                f" torch's flight recorder has no collective (TORCH_FR_BUFFER_SIZE={size}, torch {torch.__version__})."
                " guard='verify' records by itself."
            )
        return waits

    def _prepare(self) -> None:
        """Begin with what takes time: look at all that may move, and let torch say where calls came from."""
        if self._prepares:
            return
        self._prepares = True
        if self.channel.rank == 0:
            self.channel.post("guard/soon")

        def prepare() -> None:
            for recorder in self._recorders:
                recorder.calls(sites=True)
            self._knows_sites = True

        self._sites = threading.Thread(target=prepare, name="lockstep-guard-sites", daemon=True)
        self._sites.start()

    def _holds_up(self) -> bool:
        """Return whether the main thread may wait for what :meth:`_prepare` has begun: torch imports modules for it."""
        return self._sites is not None and self._sites.is_alive() and waits_for_import(self._trains)

    def _ask_about(self, raised: str) -> None:
        outstanding = next(iter(self._outstanding()), None)
        self._inquiries.ask(
            Question(rank=self.channel.rank, outstanding=outstanding, seconds=0.0, raised=raised)
        )

    def _outstanding(self) -> list[Outstanding]:
        return [one for recorder in self._recorders for one in recorder.outstanding()]

    def _is_rank(self, pid: int) -> bool:  # of a child process
        return pid in {self.channel.process_of(rank)[1] for rank in range(self.channel.world_size)}

    def run_soon(self, function: Callable[[], None]) -> None:
        self._to_do.put(function)

    def silence(self, rank: int) -> Silence:
        # A rank that fails says so before it closes its channel.
        failed = self._has_failed() or self._has_raised(rank)
        return self._silent.look(rank, has_failed=failed)

    # -- what comes of a question ----------------------------------------------------------------------

    def tell(self, verdict: Verdict, states: Mapping[int, RankState]) -> None:
        if verdict.kind == "slow":
            _log.warning(verdict.text)
        else:
            self._report(verdict, states)

    def decide(self, verdict: Verdict) -> None:
        """Take an error for that of this rank, unless a rank that has failed explains everything."""
        # The rank that collects does so before the others hear of it: theirs is no failure that explains its
        # own.
        if self.error is None and not self._has_failed():
            self.error = verdict.error()

    def take_answer(self, answer: Answer) -> None:
        if answer.verdict is not None and answer.verdict.kind != "slow":
            self.decide(answer.verdict)
        if self.error is not None:
            if not self._concluded:
                self._concluded = True
                self._conclude(self.error)
            end_connections(answer.ends, hosts=answer.hosts, kept_ports=answer.kept_ports)
            abort_devices()
        with self._answered:
            self._answers += 1
            self._answered.notify_all()
