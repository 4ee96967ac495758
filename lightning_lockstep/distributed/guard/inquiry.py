"""Rank 0 asks all ranks where they are, decides, and sends each the verdict; a silent rank is asked by others."""

from __future__ import annotations

import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import psutil

from lightning_lockstep.distributed.guard.activity import Connection, connections, ports_of
from lightning_lockstep.distributed.guard.rank_state import Question, RankState
from lightning_lockstep.distributed.guard.records import Outstanding
from lightning_lockstep.distributed.guard.verdict import Verdict, judge
from lightning_lockstep.distributed.side_channel.channel import Message, SideChannel

# -- What is known of a rank that does not answer --

# So much of one core counts as computing, and so far back it counts [s].
_BUSY_SHARE, _WINDOW = 0.05, 10.0
# How far apart two looks at a process are, at least, for the second to say what it does [s].
_APART = 0.2


class Silence(NamedTuple):
    """What is known of a rank that does not answer."""

    reason: str
    host: str = ""  # empty: not known
    has_ended: bool = False  # its process
    has_left: bool = False  # its program has come to its end, without an error
    is_stopped: bool = False  # its process
    # Its process runs, though no thread of Python's can answer: as while C computes and keeps Python's lock.
    is_moving: bool = False
    connections: tuple[Connection, ...] = ()  # as far as this rank can see them


class SilentRanks:
    """Looks at ranks that do not answer: more closely at those on this host."""

    def __init__(self, channel: SideChannel) -> None:
        self._channel = channel
        self._spent: dict[int, deque[tuple[float, float]]] = defaultdict(deque)

    def look(self, rank: int, *, has_failed: bool) -> Silence:
        """Return what is known of a rank that does not answer; to be called now and then while it does not.

        ``has_failed``: if it has left, it or another rank is known to have failed.
        """
        host, pid = self._channel.process_of(rank)
        if self._channel.has_closed(rank):
            said = "it has come to the end of its program"
            return Silence(said, host, has_ended=has_failed, has_left=not has_failed)
        if host != socket.gethostname() or not pid:
            place = f" (process {pid} on host {host})" if pid else ""
            if self._channel.answers(rank):
                return Silence(f"it runs, and does not answer{place}", host, is_moving=True)
            return Silence(f"it is stopped, has ended or cannot be reached{place}", host)
        try:
            process = psutil.Process(pid)
            status, times = process.status(), process.cpu_times()
        except psutil.NoSuchProcess:
            status = psutil.STATUS_DEAD
        if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
            return Silence(f"its process {pid} has ended", host, has_ended=True)
        there = tuple(connections(pid))
        if status == psutil.STATUS_STOPPED:
            what = f"its process {pid} is stopped, by a signal or a debugger"
            return Silence(what, host, is_stopped=True, connections=there)
        if self._computes(pid, times.user + times.system) or status == psutil.STATUS_DISK_SLEEP:
            return Silence(f"its process {pid} computes", host, is_moving=True, connections=there)
        return Silence(f"its process {pid} does not answer", host, connections=there)

    def _computes(self, pid: int, spent: float) -> bool:
        now, looks = time.monotonic(), self._spent[pid]
        looks.append((now, spent))
        while looks[0][0] < now - _WINDOW:
            looks.popleft()
        began, before = looks[0]
        return now - began > _APART and (spent - before) / (now - began) > _BUSY_SHARE


# -- How a rank finds out why a collective does not complete: one rank collects where all are, and tells all
#     rank that waits                 collecting rank                 every rank (a thread of the guard)
#     ---------------                 ---------------                 ----------------------------------
#     question  ------------------->  WHERE?  -------------------->   its last calls, its stack
#               <-- TAKEN                     <--------------------
#                                     judges
#               <-- ANSWER (nothing)
#                                     ANSWER (verdict)  ---------->   raises it
#
# Rank 0 collects. Where it does not take the question, the next rank is asked.

_ASK, _TAKEN, _WHERE, _STATE, _ANSWER = (
    f"guard/{name}" for name in ("ask", "taken", "where", "state", "answer")
)
# How long a rank may take to say where it is [s], where it is known to be stopped, and where its host may be busy.
_STATE_LIMIT, _BUSY_LIMIT = 2.0, 10.0
# How long it may take if it also says where it has called each of its collectives [s].
_SITES_LIMIT = 10.0
# How long a rank may take to say that it takes a question [s], where it is known to be stopped, and else.
_TAKE_LIMIT, _BUSY_TAKE_LIMIT = 1.0, 8.0
# After which time all are asked once more where an error of the backend is not explained [s]: the connections of a rank
# that comes to its end are closed a moment before it says so.
_LEAVES_WITHIN = 0.5
# After which time they are asked once more where what they have said may have passed already [s].
_PASSES_WITHIN = 0.2


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank gets."""

    verdict: Verdict | None  # why the collective does not complete; None: not known
    ends: tuple[Connection, ...] = ()  # of this rank with others, to be ended so that no wait is left
    hosts: tuple[str, ...] = ()  # of ranks that have not answered, whose connections nobody knows
    kept_ports: tuple[int, ...] = ()  # connections with these hosts that stay: side channels, the store


class AskedRank(Protocol):
    """The rank for which `Inquiries` asks and answers: its watch."""

    # Where it is; with all call sites, if ``sites``, which takes seconds.
    def state(self, sites: bool = False) -> RankState: ...
    # What it knows of a rank that does not answer.
    def silence(self, rank: int) -> Silence: ...
    # On the collecting rank: an error, before any rank hears of it.
    def decide(self, verdict: Verdict) -> None: ...
    # An error on every rank, any other answer on the asking one.
    def take_answer(self, answer: Answer) -> None: ...
    # On the collecting rank: an error or a remark, and what each rank has said.
    def tell(self, verdict: Verdict, states: Mapping[int, RankState]) -> None: ...
    # Has a function called on the guard's thread.
    def run_soon(self, function: Callable[[], None]) -> None: ...


@dataclass
class _Collection:
    """What the collecting rank has so far."""

    question: Question
    number: int
    soonest: float
    deadline: float
    sites: bool
    is_second: bool
    states: dict[int, RankState] = field(default_factory=dict)


class Inquiries:
    """Asks where the ranks are, and answers for this one; its :meth:`work` runs on one thread of its own."""

    def __init__(
        self,
        channel: SideChannel,
        own: AskedRank,
        *,
        stall_timeout: float,  # how long a collective may take that all ranks have called [s]
        history: int,  # how many of the last calls of each rank a report lists
    ) -> None:
        self._channel, self._own = channel, own
        self._stall_timeout, self._history = stall_timeout, history
        self._count = 0
        self._collection: _Collection | None = None
        self._second: tuple[Question, float] | None = None  # what is to be asked once more, and when
        self._waiting: list[Question] = []
        self._asked: tuple[Question, int, float] | None = None  # the question, who is to take it, until when
        self._taken_by: tuple[Question, int] | None = None  # the question, and who collects answers to it
        # When a remark was made about a wait, and how long that was [s].
        self._remarks: dict[Outstanding | int, tuple[float, float]] = {}
        self._answered: Verdict | None = None  # the verdict, on the collecting rank

        def on(topic: str, handler: Callable[[Message], None]) -> Callable[[], None]:
            return channel.on(topic, lambda message: own.run_soon(lambda: handler(message)))

        self._remove = [
            on(_ASK, lambda message: self._take_question(_question(message.body))),
            on(_TAKEN, lambda message: self._taken(message.sender)),
            on(_WHERE, self._send_state),
            on(_STATE, self._take_state),
            on(_ANSWER, self._take_answer),
        ]

    def ask(self, question: Question) -> None:
        """Ask why a collective does not complete; on the guard's thread."""
        self._ask(question, 0)

    def work(self) -> None:
        """Go on with what has waited long enough; to be called now and then on the guard's thread."""
        now = time.monotonic()
        if self._asked is not None and now > self._asked[2] and self._takes_no_question(*self._asked[1:]):
            self._ask(self._asked[0], self._asked[1] + 1)
        if self._taken_by is not None and self._own.silence(self._taken_by[1]).has_left:
            self._ask(self._taken_by[0], self._taken_by[1] + 1)  # it has come to its end without an answer
        if self._collection is not None and (
            now > self._collection.deadline or self._only_ended_missing(now > self._collection.soonest)
        ):
            self._finish(self._collection)
        if self._second is not None and now > self._second[1]:
            question, self._second = self._second[0], None
            self._begin(question, is_second=True)

    def _takes_no_question(self, rank: int, asked_until: float) -> bool:
        """Return whether a rank that has not taken a question in time will not do so, rather than be busy."""
        known = self._own.silence(rank)
        cannot_answer = known.is_stopped or known.has_ended or known.has_left
        return cannot_answer or time.monotonic() > asked_until - _TAKE_LIMIT + _BUSY_TAKE_LIMIT

    @property
    def is_busy(self) -> bool:
        """Whether :meth:`work` has to be called soon."""
        asks = self._asked is not None or self._taken_by is not None
        return asks or self._collection is not None or self._second is not None

    def close(self) -> None:
        """Stop listening."""
        for remove in self._remove:
            remove()

    def _ask(self, question: Question, to: int) -> None:
        self._asked = self._taken_by = None
        if to >= self._channel.world_size:
            return
        if to == self._channel.rank:
            self._take_question(question)
            return
        self._asked = question, to, time.monotonic() + _TAKE_LIMIT
        self._channel.post(_ASK, asdict(question), to=to)

    def _taken(self, by: int) -> None:
        if self._asked is not None:
            self._taken_by = self._asked[0], by
        self._asked = None

    # -- the collecting rank ---------------------------------------------------------------------------

    def _take_question(self, question: Question) -> None:
        if question.rank != self._channel.rank:
            self._channel.post(_TAKEN, to=question.rank)
        if self._answered is not None:
            self._send_answer(Answer(verdict=self._answered), question)
        elif self._collection is not None or self._second is not None:
            self._waiting.append(question)
        else:
            self._begin(question)

    def _begin(self, question: Question, *, sites: bool = False, is_second: bool = False) -> None:
        self._count += 1
        now = time.monotonic()
        deadline = now + (_SITES_LIMIT if sites else _BUSY_LIMIT)
        self._collection = _Collection(question, self._count, now + _STATE_LIMIT, deadline, sites, is_second)
        self._channel.post(_WHERE, [self._count, sites])
        self._collection.states[self._channel.rank] = self._own.state(sites)
        self._finish_if_complete()

    def _take_state(self, message: Message) -> None:
        number, data = message.body
        if self._collection is not None and number == self._collection.number:
            self._collection.states[message.sender] = RankState.from_data(data)
            self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self._collection is not None and len(self._collection.states) == self._channel.world_size:
            self._finish(self._collection)

    def _only_ended_missing(self, stopped: bool) -> bool:
        """Return whether all ranks that have not answered have ended or left or, if that is to count, are stopped."""
        assert self._collection is not None
        missing = set(range(self._channel.world_size)) - set(self._collection.states)
        silent = [self._own.silence(rank) for rank in missing]
        return all(one.has_ended or one.has_left or (stopped and one.is_stopped) for one in silent)

    def _finish(self, collection: _Collection) -> None:
        self._collection = None
        states = dict(sorted(collection.states.items()))
        missing = [rank for rank in range(self._channel.world_size) if rank not in states]
        silent = {rank: self._own.silence(rank) for rank in missing}
        reasons = {rank: silence.reason for rank, silence in silent.items()}
        left = [rank for rank, silence in silent.items() if silence.has_left]
        running = [rank for rank, silence in silent.items() if silence.is_moving]
        verdict = judge(
            collection.question,
            states,
            reasons,
            left=left,
            running=running,
            stall_timeout=self._stall_timeout,
            history=self._history,
        )
        failed = [rank for rank, silence in silent.items() if silence.has_ended and not silence.has_left]
        if verdict is not None and set(failed) & set(verdict.ranks):
            verdict = None  # that is a failure, which is reported as such
        if verdict is not None and verdict.lacks_sites and not collection.sites:
            self._begin(collection.question, sites=True, is_second=collection.is_second)
            return
        if not collection.is_second and (once_more := _once_more(collection, verdict, silent)):
            self._second = collection.question, time.monotonic() + once_more
            return
        if verdict is not None and (verdict.kind != "slow" or self._is_news(collection.question)):
            self._own.tell(verdict, states)
        if verdict is not None and verdict.kind != "slow":
            self._answered = verdict
            self._own.decide(verdict)
            self._send_error(verdict, states, silent)
        else:
            self._send_answer(Answer(verdict=verdict), collection.question)
        waiting, self._waiting = self._waiting, []
        for question in waiting:
            if question.outstanding == collection.question.outstanding and not question.raised:
                self._send_answer(Answer(verdict=verdict), question)
            else:
                self._take_question(question)

    def _is_news(self, question: Question) -> bool:
        """Return whether a remark about a wait is to be made: again once that is about twice as long as at the last."""
        wait = question.outstanding or question.rank
        at, seconds = self._remarks.get(wait, (0.0, 0.0))
        now = time.monotonic()
        if now - question.seconds < at and question.seconds < 1.9 * seconds:
            return False
        self._remarks[wait] = now, question.seconds
        return True

    def _send_error(
        self, verdict: Verdict, states: Mapping[int, RankState], silent: Mapping[int, Silence]
    ) -> None:
        """Let every rank raise the error, and end its connections with the others."""
        ends = {rank: set(state.connections) for rank, state in states.items()}
        ends |= {rank: set(silence.connections) for rank, silence in silent.items()}
        kept = {port for state in states.values() for port in state.ports}
        hosts = tuple(
            {silence.host for silence in silent.values() if silence.host and not silence.connections}
        )
        answers = {
            rank: Answer(
                verdict=verdict,
                ends=tuple(sorted(_shared(rank, ends, kept))),
                hosts=hosts,
                kept_ports=tuple(sorted(kept)),
            )
            for rank in range(self._channel.world_size)
        }
        for rank, answer in answers.items():
            if rank != self._channel.rank:
                self._channel.post(_ANSWER, asdict(answer), to=rank)
        self._channel.flush(0.5)  # before this rank ends the connections by which others would notice
        self._own.take_answer(answers[self._channel.rank])

    def _send_answer(self, answer: Answer, question: Question) -> None:
        if question.rank == self._channel.rank:
            self._own.take_answer(answer)
        else:
            self._channel.post(_ANSWER, asdict(answer), to=question.rank)

    # -- every rank ------------------------------------------------------------------------------------

    def _send_state(self, message: Message) -> None:
        number, sites = message.body
        self._channel.post(_STATE, [number, self._own.state(sites).to_data()], to=message.sender)

    def _take_answer(self, message: Message) -> None:
        self._asked = self._taken_by = None
        self._own.take_answer(_answer(message.body))


def _once_more(
    collection: _Collection, verdict: Verdict | None, silent: Mapping[int, Silence]
) -> float | None:
    """Return after which time the ranks are to be asked once more [s], if they are."""
    if verdict is not None:
        return _PASSES_WITHIN if verdict.may_pass else None
    return _LEAVES_WITHIN if collection.question.raised and not silent else None


def _shared(
    rank: int, ends: Mapping[int, Collection[Connection]], kept_ports: Collection[int]
) -> Iterator[Connection]:
    """Return the connections of a rank whose other ends are of other ranks, without those that are to stay."""
    others = {end for other, theirs in ends.items() if other != rank for end in theirs}
    for here, there in ends.get(rank, ()):
        if (there, here) in others and not ports_of((here, there)) & set(kept_ports):
            yield here, there


def _answer(data: Mapping[str, Any]) -> Answer:
    given = data["verdict"]
    verdict = None if given is None else Verdict(**{**given, "ranks": tuple(given["ranks"])})
    ends = tuple((here, there) for here, there in data["ends"])
    return Answer(
        verdict=verdict, ends=ends, hosts=tuple(data["hosts"]), kept_ports=tuple(data["kept_ports"])
    )


def _question(data: Mapping[str, Any]) -> Question:
    outstanding = data["outstanding"]
    wanted = None if outstanding is None else Outstanding(*outstanding)
    return Question(
        rank=data["rank"], outstanding=wanted, seconds=float(data["seconds"]), raised=str(data["raised"])
    )
