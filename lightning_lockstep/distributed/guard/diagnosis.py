"""Why a collective does not complete: rank 0 asks all ranks where they are, decides, and tells them."""

# The messages, each a topic of the side channel:
#
#   rank that waits                       rank 0                              every rank
#   ---------------                       ------                              ----------
#   request  -------------------------->  where [number, sites]  ---------->
#                                         <-------------------------------    state [number, RankState]
#                                         diagnose() for each request
#            <-- answer (no error), if the request was about an error of the backend: its sender waits
#            or, if it is an error:       failure of kind "collective" -> all raise it
#
# With `where` rank 0 begins a look; the number of the look tells its states from late ones of an earlier look. A rank
# sends a request about a wait `window` seconds before the stall timeout. Rank 0 looks at once, and again when the
# stall timeout is over: by then each rank knows whether it has moved since the first look. It looks a third time if
# what it found may have passed already. A request about an error of the backend gets two looks. All requests that are
# due share one look. A second request about the same collective is dropped. Rank 0 stops waiting for a silent
# rank as soon as it knows that no answer will come, and at the latest after `ANSWERS_WITHIN`.
#
# If rank 0 itself is silent, nobody answers; the side channel reports rank 0 as lost after its silence limit.

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

from lightning_lockstep.distributed.failure.attempt import Attempt
from lightning_lockstep.distributed.guard.observer import Activity, RankObserver, probe_unresponsive
from lightning_lockstep.distributed.guard.rank_state import (
    DiagnosisRequest,
    Outstanding,
    RankState,
    UnresponsiveRank,
)
from lightning_lockstep.distributed.guard.report import Diagnosis, diagnose
from lightning_lockstep.distributed.side_channel.channel import Message, SideChannel

_log = logging.getLogger(__name__)

_REQUEST, _WHERE, _STATE, _ANSWER = (f"guard/{name}" for name in ("request", "where", "state", "answer"))
# How long rank 0 waits for the state of a rank [s] if the process of that rank is known to be stopped ...
_STOPPED_WITHIN = 2.0
#: ... and otherwise, because its host may be busy, or torch may be loading what reads call sites.
ANSWERS_WITHIN = 10.0
# After which time rank 0 asks once more if nothing explains an error of the backend [s], because the connections of a
# rank that ends are closed a moment before it says so.
_LEAVES_WITHIN = 0.5
_VERIFY = (
    'With guard="verify" (or LOCKSTEP_DEBUG=1) the ranks compare each collective before it runs, and the same error'
    " comes at once, from the first call that differs."
)
# After which time rank 0 asks once more if what it found may have passed already [s].
_PASSES_WITHIN = 0.2


@dataclass
class _Open:
    """A request that rank 0 has received, and not answered yet."""

    request: DiagnosisRequest
    came: float
    due: float  # when its next look is to begin
    looks: int = 0


@dataclass
class _Look:
    number: int
    began: float
    states: dict[int, RankState] = field(default_factory=dict)


class StallDiagnosis:
    """Asks why a collective does not complete, and answers for this rank; used by the guard's thread alone."""

    def __init__(
        self,
        channel: SideChannel,
        own: RankObserver,
        attempt: Attempt,
        to_do: queue.SimpleQueue[Callable[[], None] | None],  # work for the guard's thread
        *,
        stall_timeout: float,  # how long a collective may take once all ranks have called it [s]
        window: float,  # how long before the stall timeout a request comes [s]
        verifies: bool = False,  # whether the ranks compare their calls before they make them
    ) -> None:
        self._channel, self._own, self._attempt = channel, own, attempt
        self._stall_timeout, self._window = stall_timeout, window
        self._verifies = verifies
        self.answers = 0  # how many answers have come about errors of the backend
        self._numbers = itertools.count()
        self._look: _Look | None = None
        self._open: list[_Open] = []
        self._activities: dict[int, Activity] = {}  # of ranks that do not answer
        # How long a wait was at the last remark about it [s].
        self._remarks: dict[Outstanding | None, float] = {}

        def on(topic: str, handler: Callable[[Message], None]) -> Callable[[], None]:
            return channel.on(topic, lambda message: to_do.put(lambda: handler(message)))

        self._remove = [
            on(_REQUEST, self._take_request),
            on(_WHERE, self._send_state),
            on(_STATE, self._take_state),
            on(_ANSWER, self._take_answer),
        ]

    def close(self) -> None:
        for remove in self._remove:
            remove()

    def request(self, outstanding: Outstanding | None, seconds: float, raised: str = "") -> None:
        """Ask about a collective, which ``raised`` an error or has not completed for this many seconds."""
        self._channel.post(_REQUEST, [outstanding, seconds, raised], to=0)

    def forget(self) -> None:
        """Answer and drop all requests, because this process was stopped for a while, or a failure explains them."""
        self._look = None
        dropped, self._open = self._open, []
        for one in dropped:
            self._answer(one.request)

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    def work(self) -> None:
        """Begin a look that is due, or end one that waits in vain; call this now and then."""
        now = time.monotonic()
        if self._attempt.has_failure:  # it explains all requests
            self.forget()
        elif self._look is None and any(one.due <= now for one in self._open):
            self._begin_look(now)
        elif self._look is not None and self._is_in_vain(self._look, now - self._look.began):
            self._end_look(self._look)

    # -- rank 0 --

    def _take_request(self, message: Message) -> None:
        wanted, seconds, raised = message.body
        outstanding = None if wanted is None else Outstanding(*wanted)
        waits = [one.request.outstanding for one in self._open if not one.request.raised]
        if raised or outstanding not in waits:
            now = time.monotonic()
            request = DiagnosisRequest(message.sender, outstanding, seconds, raised)
            self._open.append(_Open(request, now, now))

    def _begin_look(self, now: float) -> None:
        self._look = _Look(next(self._numbers), now)
        self._activities.clear()
        # Torch takes seconds to load what reads call sites, so the first look for an error of the backend has none.
        sites = any(one.looks or not one.request.raised for one in self._open if one.due <= now)
        self._channel.post(_WHERE, [self._look.number, sites], to=range(self._channel.world_size))

    def _take_state(self, message: Message) -> None:
        number, data = message.body
        if self._look is not None and number == self._look.number:
            self._look.states[message.sender] = RankState.from_data(data)
            if len(self._look.states) == self._channel.world_size:
                self._end_look(self._look)

    def _is_in_vain(self, look: _Look, seconds: float) -> bool:
        """Return whether no more states are expected, ``seconds`` after all ranks were asked."""
        stopped = seconds > _STOPPED_WITHIN
        return seconds > ANSWERS_WITHIN or all(
            one.has_ended or one.has_left or (stopped and one.is_stopped) for one in self._silent(look).values()
        )

    def _silent(self, look: _Look) -> dict[int, UnresponsiveRank]:
        silent = sorted(set(range(self._channel.world_size)).difference(look.states))
        with self._own.activity.left_out():
            return {rank: probe_unresponsive(self._channel, rank, self._activities) for rank in silent}

    def _end_look(self, look: _Look) -> None:
        self._look = None
        now, states, silent = time.monotonic(), dict(sorted(look.states.items())), self._silent(look)
        for one in [one for one in self._open if one.due <= look.began]:
            one.looks += 1
            request = one.request._replace(seconds=one.request.seconds + now - one.came)
            found = diagnose(request, states, silent, stall_timeout=self._stall_timeout)
            again = self._looked_at_again(one, found, silent)
            if again is None:
                self._open.remove(one)
                self._conclude(request, found)
            else:
                one.due = time.monotonic() + again
            if self._attempt.has_failure:
                return  # work() answers the other requests

    def _looked_at_again(
        self, one: _Open, found: Diagnosis | None, silent: Mapping[int, UnresponsiveRank]
    ) -> float | None:
        """Return after which time [s] rank 0 is to ask the ranks once more, or ``None`` if it is not."""
        if one.request.raised:
            if one.looks > 1 or (found is None and silent):
                return None
            return _LEAVES_WITHIN if found is None else 0.0
        if found is None:
            return None  # the wait is over
        if one.looks == 1:
            # Even if the first look took long, half a window at least must pass, so that a movement shows.
            return max(one.came + self._window - time.monotonic(), self._window / 2)
        return _PASSES_WITHIN if one.looks == 2 and found.may_pass else None

    def _conclude(self, request: DiagnosisRequest, found: Diagnosis | None) -> None:
        if found is None or found.kind == "slow":
            if found is not None and self._is_news(request):
                _log.warning(found.text)
            self._answer(request)
            return
        if found.kind == "mismatch" and not self._verifies:
            found = replace(found, text=f"{found.text}\n\n{_VERIFY}")
        # A rank that was silent raises the error too, once it goes on.
        if not self._attempt.report_diagnosis(found.error()):
            self._answer(request)

    def _is_news(self, request: DiagnosisRequest) -> bool:
        """Return whether to log a remark about a wait: the first one, and one each time that it has about doubled."""
        if request.seconds < 1.9 * self._remarks.get(request.outstanding, 0.0):
            return False
        self._remarks[request.outstanding] = request.seconds
        return True

    def _answer(self, request: DiagnosisRequest) -> None:
        if request.raised:  # else nobody waits for an answer
            self._channel.post(_ANSWER, to=request.rank)

    # -- every rank --

    def _send_state(self, message: Message) -> None:
        number, sites = message.body
        self._channel.post(_STATE, [number, asdict(self._own.state(sites))], to=0)

    def _take_answer(self, message: Message) -> None:
        with self._channel.news:
            self.answers += 1
            self._channel.news.notify_all()
