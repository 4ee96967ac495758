"""All ranks leave a loop after the same step, though only one of them wants to.

Ranks are not at the same step when somebody asks: one may be late, another may have run ahead. So rank 0
asks every rank for a promise, and picks the furthest one:

    any rank         rank 0                        every rank (receiving thread)
    --------         ------                        -----------------------------
    request  ----->  PROMISE?   ----------------->  "I shall not go beyond step h before you decide"
                                <-----------------  h = steps passed + 1
                     last = max(h)
                     COMMIT last  --------------->  leave after step `last`

No rank can be beyond ``last`` when the decision arrives, since none goes beyond its own promise before. The main thread
takes no part until a request exists: then it waits, at the step it has promised, for the few hundred microseconds that
the decision may still need. Each rank counts steps for itself; every rank must count the same ones.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.failure.attempt import attempt_on
from lightning_lockstep.distributed.failure.process_exit import clock
from lightning_lockstep.distributed.side_channel.channel import Message, SideChannel

_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """One rank's request that all ranks leave."""

    rank: int  # that asked
    kind: str  # ``breakpoint`` or ``preempted``; whatever the asking and the leaving side agree on
    reason: str


@dataclass(frozen=True)
class StopDecision:
    """What all ranks know when they leave, the same on each."""

    step: int  # number of steps after which all leave
    requests: tuple[Request, ...]  # in the order in which rank 0 received them

    @property
    def reason(self) -> str:
        """One line that names the ranks that asked and why."""
        return "; ".join(f"rank {r.rank}: {r.reason}" for r in sorted(self.requests, key=lambda r: r.rank))

    def asks_for(self, kind: str) -> bool:
        return any(request.kind == kind for request in self.requests)


class StepAgreement:
    """Lets any rank request a stop at any time, and gives every rank the same step after which to leave.

    Args:
        channel: The side channel of the run.
        name: Tells several agreements on one channel apart.
        timeout: Longest wait for a rank's promise and for rank 0's decision [s].

    Ranks: one object on every rank. Nothing is sent until a rank asks; then 4 messages per rank.
    """

    def __init__(self, channel: SideChannel, *, name: str = "stop", timeout: float = 60.0) -> None:
        self.channel, self.timeout, self._name = channel, timeout, name
        self.decision: StopDecision | None = None
        self.in_fit = False  # a fit counts the steps, and nobody else
        self._passed = 0
        self._attention = False
        self._promise: int | None = None
        self._committed: StopDecision | None = None
        self._own: list[tuple[str, str]] = []
        # Of rank 0: what was requested in this round, and who has promised what.
        self._requests: list[Request] = []
        self._promises: dict[int, int] = {}
        self._topic = f"agree/{name}"  # then another one whenever this is started over
        self._remove = channel.on(self._topic, self._take)

    def request(self, reason: str, *, kind: str = "breakpoint") -> None:
        """Ask that all ranks leave together, soon.

        Args:
            reason: Why, in one line.
            kind: What for; comes back in the decision.

        Ranks: any rank, alone, from any thread or signal handler; one message to rank 0, no waiting.
        """
        self._own.append((kind, reason))
        self.channel.post(self._topic, ["request", kind, reason], to=0)

    def unanswered(self, kind: str) -> list[str]:
        """Return the reasons of this rank's own requests of a kind that no decision has answered yet."""
        return [reason for own, reason in self._unanswered() if own == kind]

    def passed(self) -> StopDecision | None:
        """Count one step as done and return the decision if all ranks leave here.

        Ranks: every rank, after each step, from one thread. Costs a fraction of a microsecond while no rank
        has asked; once one has, waits for rank 0's decision at the step this rank has promised.
        """
        # The order matters: the receiving thread sets `_attention` before it reads `_passed`. So either that thread
        # counts this step, or this step finds `_attention` set.
        self._passed += 1
        if not self._attention:
            return None
        return self._consider()

    def start_over(self, *, keep_requests: bool = False) -> None:
        """Forget the decision and count from zero.

        Args:
            keep_requests: Ask again for what this rank has asked for and no decision has answered.

        Ranks: every rank, at the same step, or before the first one.
        """
        with self.channel.news:
            again = self._unanswered() if keep_requests else []
            self._passed, self._attention = 0, False
            self._promise = self._committed = self.decision = None
            self._own.clear()
            self._requests.clear()
            self._promises.clear()
        self._remove()
        self._topic = attempt_on(self.channel).topic(f"agree/{self._name}")
        # It also takes what ranks that are there already have posted.
        self._remove = self.channel.on(self._topic, self._take)
        for kind, reason in again:
            self.request(reason, kind=kind)

    def close(self) -> None:
        """Stop listening."""
        self._remove()
        self._promises.clear()  # so that nothing more is decided

    def _unanswered(self) -> list[tuple[str, str]]:
        answered = {(r.kind, r.reason) for r in self.decision.requests} if self.decision else set()
        return [own for own in self._own if own not in answered]

    def _consider(self) -> StopDecision | None:
        with self.channel.news:
            must_wait = self._promise is not None and self._passed >= self._promise
            if must_wait and not self.channel.wait_for(self._may_go_on, self.timeout):
                _log.warning(
                    "rank %d received no stop decision from rank 0 within %.0f s; it continues without one",
                    self.channel.rank,
                    self.timeout,
                )
                self._attention, self._promise = False, None
                return None
            if self._committed is not None and self._passed >= self._committed.step:
                self.decision = self._committed
                self._attention = False
            return self.decision

    def _may_go_on(self) -> bool:
        return self._committed is not None or self._promise is None or self._passed < self._promise

    def _take(self, message: Message) -> None:
        what, *rest = message.body
        with self.channel.news:
            if message.topic != self._topic:
                return  # of an earlier round
            if what == "request":
                self._requested(Request(message.sender, *rest))
            elif what == "promise?":
                self._attention = True
                self._promise = self._passed + 1
                self.channel.post(self._topic, ["promise", self._promise], to=0)
            elif what == "promise":
                self._promises[message.sender] = rest[0]
                if len(self._promises) == self.channel.world_size and self._committed is None:
                    self._commit()
            elif what == "commit":
                step, requests = rest
                self._leave_after(StopDecision(step, tuple(Request(*r) for r in requests)))

    def _requested(self, request: Request) -> None:
        if self._committed is not None:
            return  # all are leaving already
        self._requests.append(request)
        if len(self._requests) == 1:
            self.channel.post(self._topic, ["promise?"], to=range(self.channel.world_size))
            if self._committed is not None:
                return  # a process without others has answered at once
            clock.after(self.timeout / 2, self._no_answer, self._topic)

    def _no_answer(self, topic: str) -> None:
        with self.channel.news:
            if topic != self._topic or self._committed is not None or not self._promises:
                return
            missing = sorted(set(range(self.channel.world_size)) - set(self._promises))
            _log.warning(
                "%s did not answer the request to stop within %.0f s; the other ranks stop without them",
                ranks_in_words(missing),
                self.timeout / 2,
            )
            self._commit()

    def _commit(self) -> None:
        # Once in a round: a rank may have left already when a second decision arrives.
        decision = StopDecision(max(self._promises.values()), tuple(self._requests))
        self.channel.post(self._topic, ["commit", decision.step, decision.requests])
        self._leave_after(decision)

    def _leave_after(self, decision: StopDecision) -> None:
        self._committed, self._attention = decision, True
        self.channel.news.notify_all()
