"""Why a collective does not complete: decided from what all ranks have said, by the one rank that asked them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_lockstep._tables import plain_table
from lightning_lockstep.distributed.guard.call_report import CollectiveCall, mismatch_report
from lightning_lockstep.distributed.guard.comparison import as_far_as_known, comparison_key, odd_ones
from lightning_lockstep.distributed.guard.rank_state import RankState, members
from lightning_lockstep.distributed.guard.recorded import Outstanding
from lightning_lockstep.errors import CollectiveError, CollectiveMismatchError, CollectiveStallError

__all__ = ["Question", "Verdict", "judge"]

# How a rank is marked in the table of a stall.
_CAUSE = "<- never came"
# What a backend says that has received other sizes than it expected: shapes that ranks may choose did not fit.
_SIZES = ("ended the process", "data size")
Kind = Literal["mismatch", "stall", "slow"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Why a rank asks where the others are.

    Attributes:
        rank: The rank that asks.
        outstanding: The collective that it waits in; ``None`` for a send or receive.
        seconds: How long it has waited.
        raised: What the backend has raised, if it has.
    """

    rank: int
    outstanding: Outstanding | None
    seconds: float
    raised: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a question.

    Attributes:
        kind: ``mismatch``: ranks called different things; ``stall``: a rank did not come and does not move;
            ``slow``: it has not come yet, and moves: a remark, no error.
        text: The report, the same for every rank.
        ranks: The ranks that are the cause; empty where all are.
        lacks_sites: Whether it does not say of each rank where that has called what it has called.
        may_pass: Whether it rests on where the ranks were when each of them said so, a moment apart: it holds once it
            is found twice.
    """

    kind: Kind
    text: str
    ranks: tuple[int, ...] = ()
    lacks_sites: bool = False
    may_pass: bool = False

    def error(self) -> CollectiveError:
        """Return the error that every rank raises.

        Raises:
            ValueError: It is a remark.
        """
        if self.kind == "slow":
            raise ValueError("a slow rank is no error")
        return (
            CollectiveMismatchError(self.text) if self.kind == "mismatch" else CollectiveStallError(self.text)
        )


def judge(
    question: Question,
    states: Mapping[int, RankState],
    silent: Mapping[int, str],
    *,
    left: Collection[int] = (),
    stall_timeout: float = 0.0,
    history: int = 0,
) -> Verdict | None:
    """Return why a collective does not complete, or ``None`` where the records say nothing, or it has completed.

    Args:
        question: Who waits, and for what.
        states: What each rank has said of itself, by rank.
        silent: Why a rank that has not answered is silent, by rank.
        left: Those of the silent ranks whose program has come to its end, which breaks connections with others.
        stall_timeout: How long a collective may take that all ranks have called [s].
        history: How many of the last calls of each rank the report lists.

    Ranks: the rank that has asked, alone; nothing is sent.
    """
    case = _Case(question, states, silent, left, stall_timeout)
    verdict = case.verdict()
    if verdict is None or not history or verdict.kind == "slow":
        return verdict
    return replace(verdict, text=f"{verdict.text}\n\n{_histories(states, history)}")


class _Case:
    """One question and what the ranks have said."""

    def __init__(
        self,
        question: Question,
        states: Mapping[int, RankState],
        silent: Mapping[int, str],
        left: Collection[int],
        stall_timeout: float,
    ) -> None:
        self.question, self.states, self.silent, self.left = question, states, silent, left
        self.stall_timeout = stall_timeout

    def verdict(self) -> Verdict | None:
        asker = self.states.get(self.question.rank)
        if asker is None:
            return None
        differing = self._first_difference(asker)
        if differing is None and any(word in self.question.raised for word in _SIZES):
            differing = self._first_difference(asker, with_own_shapes=True)
        if differing is not None:
            return differing
        if (
            self.question.raised
        ):  # the backend's own error, unless a rank that has left has broken the connections
            return self._stall(asker, sorted(self.left)) if self.left else None
        if not self._waits(asker):
            return None  # it has gone on meanwhile
        stuck = self._stuck()
        if asker.rank not in stuck:
            return self._slow(asker)
        causes = [rank for rank in sorted(self._reached_from(asker.rank)) if rank in stuck]
        idle = [rank for rank in causes if not self._waits_for(rank)]
        if any(rank in self.states and self.states[rank].raised for rank in idle):
            return None  # the backend has raised an error there, about which that rank asks itself
        return self._stall(asker, idle) if idle else self._cycle(asker, causes)

    def _waits(self, state: RankState) -> bool:
        if self.question.outstanding is None:
            return state.is_in_message()
        return self.question.outstanding in state.outstanding

    # -- what differs ----------------------------------------------------------------------------------

    def _first_difference(self, asker: RankState, *, with_own_shapes: bool = False) -> Verdict | None:
        """Return the first collective that its ranks called differently.

        It is of a group in which the asker waits, or one of those that it waits for.

        Args:
            asker: The rank that asks.
            with_own_shapes: Whether shapes count that ranks may choose, as in an all-to-all of parts that differ.
        """
        reached = [
            self.states[rank] for rank in sorted(self._reached_from(asker.rank)) if rank in self.states
        ]
        groups = [one.group for state in (asker, *reached) for one in state.outstanding]
        if self.question.raised:
            groups += [one.call.group for one in reversed(asker.calls)]
        for group in dict.fromkeys(groups):
            by_rank = {rank: s.calls_of(group) for rank, s in self.states.items() if group in s.groups}
            if len(by_rank) < 2:
                continue
            for number in sorted(set.intersection(*(set(calls) for calls in by_rank.values()))):
                calls = {rank: self.states[rank].call(Outstanding(group, number)) for rank in by_rank}
                calls = as_far_as_known(calls)
                if self._differ(calls, number, with_own_shapes):
                    return _mismatch(calls)
        return None

    def _differ(self, calls: Mapping[int, CollectiveCall], number: int, with_own_shapes: bool) -> bool:
        """Return whether calls cannot belong together; of those that are complete, less is asked."""
        open_on = [one.number for state in self.states.values() for one in state.outstanding]
        is_open = number in open_on or bool(self.question.raised)
        if with_own_shapes and is_open:
            return len({call.compared() for call in calls.values()}) > 1
        return len({comparison_key(call, exactly=is_open) for call in calls.values()}) > 1

    # -- who waits for whom ----------------------------------------------------------------------------

    def _waits_for(self, rank: int) -> set[int]:
        """Return the ranks that a rank waits for: those that have not called what it has called."""
        state = self.states.get(rank)
        if state is None:
            return set()
        missing: set[int] = set()
        for outstanding in state.outstanding:
            there = members(self.states, outstanding.group)
            missing |= {r for r in there if r != rank and not self._has_called(r, outstanding)}
        if not state.outstanding and state.is_in_message() and (peer := state.peer()) is not None:
            missing.add(peer)
        return missing

    def _has_called(self, rank: int, wanted: Outstanding) -> bool:
        return rank in self.states and self.states[rank].has_called(wanted)

    def _is_blocked(self, rank: int) -> bool:
        state = self.states.get(rank)
        return state is not None and (bool(state.outstanding) or state.is_in_message())

    def _stuck(self) -> set[int]:
        """Return the ranks that will not go on by themselves: all but those that move, or wait for such alone."""
        going_on = {r for r, s in self.states.items() if s.moves and not self._is_blocked(r)}
        while True:
            more = {
                rank
                for rank in self.states
                if rank not in going_on
                and self._is_blocked(rank)
                and (waits := self._waits_for(rank))
                and waits <= going_on
            }
            if not more:
                return (set(self.states) | set(self.silent)) - going_on
            going_on |= more

    def _reached_from(self, rank: int) -> set[int]:
        """Return the ranks that a rank waits for, and those that they wait for, and so on."""
        found: set[int] = set()
        to_visit = [rank]
        while to_visit:
            new = self._waits_for(to_visit.pop()) - found
            found |= new
            to_visit += sorted(new)
        return found

    # -- the texts -------------------------------------------------------------------------------------

    def _what(self) -> str:
        outstanding = self.question.outstanding
        if outstanding is None:
            calls = self.states[self.question.rank].calls
            if not (self.question.raised and calls):
                return "a send or receive"
            outstanding = Outstanding(calls[-1].call.group, calls[-1].call.number)
        call = self.states[self.question.rank].call(outstanding)
        return f"collective #{outstanding.number} of group {outstanding.group!r} ({call.title})"

    def _slow(self, asker: RankState) -> Verdict:
        late = [rank for rank in sorted(self._reached_from(asker.rank)) if not self._is_blocked(rank)]
        where = "; ".join(f"rank {rank} works at {self.states[rank].position.site}" for rank in late)
        site = asker.position.site
        text = (
            f"rank {asker.rank} has waited {self.question.seconds:.0f} s in {self._what()} at {site} for"
            f" {_ranks(late)}. {where}. Nothing is done about it as long as that moves."
        )
        return Verdict(kind="slow", text=text, ranks=tuple(late))

    def _stall(self, asker: RankState, causes: Sequence[int]) -> Verdict:
        whom = _ranks(causes)
        waited = f"{_ranks(self._waiting())} waited {self.question.seconds:.0f} s"
        if self.question.raised:
            waited = f"the wait of rank {asker.rank} was ended by {self.question.raised.splitlines()[0]}"
        text = f"{whom} never came to {self._what()}: {waited}\n\n{self._table(causes)}"
        for rank in causes:
            if rank in self.states and self.states[rank].position.stack:
                stack = "\n".join(f"      {place}" for place in self.states[rank].position.stack)
                text += f"\n\n    Stack of rank {rank}, innermost first:\n{stack}"
        remedy = (
            "Look at what keeps it there; every rank must call the same collectives. A rank that only needs longer can"
            " be given time by a larger stall_timeout."
        )
        may_pass = not self.question.raised and not set(causes) <= set(self.silent)
        return Verdict(kind="stall", text=f"{text}\n\n{remedy}", ranks=tuple(causes), may_pass=may_pass)

    def _cycle(self, asker: RankState, causes: Sequence[int]) -> Verdict | None:
        outstanding = self.question.outstanding
        alike = members(self.states, outstanding.group) if outstanding is not None else ()
        ranks = sorted({asker.rank, *(causes or filter(self._is_blocked, alike))})
        calls = as_far_as_known({rank: self._current(self.states[rank]) for rank in ranks})
        if (
            len(
                {
                    (*comparison_key(call, exactly=True), call.group, str(call.number))
                    for call in calls.values()
                }
            )
            > 1
        ):
            return replace(_mismatch(calls), may_pass=True)
        ranks = sorted({*ranks, *(rank for rank in alike if rank in self.states)})
        since = [self.states[rank].seconds_since_call for rank in ranks]
        if any(seconds is not None and seconds < self.stall_timeout for seconds in since):
            return None  # the last of them has come only now
        text = (
            f"{self._what()} does not complete though {_ranks(ranks)} have called it alike,"
            f" {self.question.seconds:.0f} s ago\n\n{self._table(())}\n\n"
            "Look at the network between the hosts, or at what runs beside it on other threads."
        )
        return Verdict(kind="stall", text=text, may_pass=True)

    def _current(self, state: RankState) -> CollectiveCall:
        if state.outstanding:
            asked = self.question.outstanding
            return state.call(asked if asked in state.outstanding and asked else state.outstanding[0])
        return state.message()

    def _waiting(self) -> list[int]:
        return [rank for rank in sorted(self.states) if self._is_blocked(rank)]

    def _table(self, causes: Collection[int]) -> str:
        rows: list[tuple[object, ...]] = []
        for rank in sorted({*self.states, *self.silent}):
            mark = _CAUSE if rank in causes else ""
            if rank not in self.states:
                rows.append((rank, "-", "", "", f"no answer: {self.silent[rank]}", mark))
            elif self._is_blocked(rank):
                call = self._current(self.states[rank])
                rows.append((rank, *call.columns(), call.site, mark))
            else:
                rows.append((rank, "-", "", "", self._place(self.states[rank]), mark))
        return plain_table(("rank", "operation", "dtype", "shape", "called from / now at", ""), rows)

    def _place(self, state: RankState) -> str:
        asked = self.question.outstanding
        last = state.last_call(asked.group) if asked is not None else None
        place = state.position.site
        if last is None:
            return place
        site = f" at {last.site}" if last.site else ""
        return f"{place}, after #{last.number} {last.title}{site}"


def _mismatch(calls: Mapping[int, CollectiveCall]) -> Verdict:
    return Verdict(
        kind="mismatch",
        text=mismatch_report(calls),
        ranks=odd_ones(calls),
        lacks_sites=not all(call.site for call in calls.values()),
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _histories(states: Mapping[int, RankState], history: int) -> str:
    rows = [
        (
            rank,
            f"#{one.call.number}",
            one.call.group,
            *one.call.columns(),
            one.call.site,
            "" if one.done else "not complete",
        )
        for rank, state in sorted(states.items())
        for one in state.calls[-history:]
    ]
    table = plain_table(("rank", "", "group", "operation", "dtype", "shape", "called from", ""), rows)
    return f"The last {history} collectives of each rank:\n\n{table}"
