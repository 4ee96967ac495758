"""Why a collective does not complete, decided from the states of all ranks, and the report of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_lockstep._text import first_line, plain_table, ranks_in_words
from lightning_lockstep.distributed.guard.collective_call import (
    CollectiveCall,
    as_far_as_known,
    comparison_key,
    mismatch_report,
    odd_ones,
)
from lightning_lockstep.distributed.guard.rank_state import Question, RankState, WaitingRanks, members
from lightning_lockstep.distributed.guard.records import Outstanding
from lightning_lockstep.errors import CollectiveError, CollectiveMismatchError, CollectiveStallError

# -- What is said of a collective that does not complete though nobody has called another one --

# How a rank is marked in the table.
_CAUSE = "<- never came"


class StallReport:
    """The texts for one question."""

    def __init__(
        self,
        question: Question,
        states: Mapping[int, RankState],
        silent: Mapping[int, str],  # why a rank has not answered
        waiting: WaitingRanks,
        left: Collection[int],
    ) -> None:
        self._question, self._states, self._silent, self._waiting = question, states, silent, waiting
        self._left = left

    def slow(self, late: Sequence[int]) -> str:
        """Return the remark that ranks are late and at work."""
        asker = self._states[self._question.rank]
        where = "; ".join(self._work(rank) for rank in late)
        return (
            f"rank {asker.rank} has waited {self._question.seconds:.0f} s in {self._what()} at {asker.position.site}"
            f" for {ranks_in_words(late)}. {where}. No error is raised while it makes progress."
        )

    def transfers(self) -> str:
        """Return the remark that all ranks are in a collective, whose data is still on its way."""
        asker = self._states[self._question.rank]
        return (
            f"rank {asker.rank} has waited {self._question.seconds:.0f} s in {self._what()} at {asker.position.site}."
            " All its ranks have called it alike, and data moves between them. No error is raised as long as it"
            " does."
        )

    def never_came(self, causes: Sequence[int]) -> str:
        """Return the report of ranks that did not come to a collective and do not move."""
        waited = f"{ranks_in_words(self._waiting.waiting())} waited {self._question.seconds:.0f} s"
        has_left = set(causes) <= set(self._left)
        if has_left:  # what the backend says of the closed connection tells of a crash
            waited = f"the program there has ended while rank {self._question.rank} waited"
        elif self._question.raised:
            reason = first_line(self._question.raised)
            waited = f"the wait of rank {self._question.rank} was ended by {reason}"
        text = f"{ranks_in_words(causes)} never came to {self._what()}: {waited}\n\n{self._table(causes)}"
        for rank in causes:
            if rank in self._states and self._states[rank].position.stack:
                stack = "\n".join(f"      {place}" for place in self._states[rank].position.stack)
                text += f"\n\n    Stack of rank {rank} (innermost frame last):\n{stack}"
        if has_left:
            remedy = "Fewer calls were made there than elsewhere: look for a skipped one, or a shorter loop."
        elif set(causes) <= set(self._silent):
            remedy = "Look at each silent process and its host; one that is stopped must be let go on."
        else:
            remedy = (
                "Look at what keeps it there; every rank must call the same collectives. A rank that only needs longer"
                " can be given time by a larger stall_timeout."
            )
        return f"{text}\n\n{remedy}"

    def does_not_complete(self, ranks: Sequence[int]) -> str:
        """Return the report of a collective that its ranks have called alike."""
        return (
            f"{self._what()} does not complete though {ranks_in_words(ranks)} have called it alike,"
            f" {self._question.seconds:.0f} s ago\n\n{self._table(())}\n\n"
            "Look at the network between the hosts, or at what runs beside it on other threads. A transfer that only"
            " needs longer can be given time by a larger stall_timeout."
        )

    def current(self, rank: int) -> CollectiveCall:
        """Return the call in which a rank waits."""
        state = self._states[rank]
        if not state.outstanding:
            return state.message()
        asked = self._question.outstanding
        return state.call(asked if asked and asked in state.outstanding else state.outstanding[0])

    def _work(self, rank: int) -> str:
        if rank in self._states:
            return f"rank {rank} is still running, at {self._states[rank].position.site}"
        return f"rank {rank} cannot say where it is: {self._silent[rank]}"

    def _what(self) -> str:
        outstanding = self._question.outstanding
        asker = self._states[self._question.rank]
        if outstanding is None:
            if not (self._question.raised and asker.calls):
                return "a send or receive"
            last = asker.calls[-1].call
            outstanding = Outstanding(last.group, last.number)
        call = asker.call(outstanding)
        return f"collective #{outstanding.number} of group {outstanding.group!r} ({call.title})"

    def _table(self, causes: Collection[int]) -> str:
        rows: list[tuple[object, ...]] = []
        for rank in sorted({*self._states, *self._silent}):
            mark = _CAUSE if rank in causes else ""
            if rank not in self._states:
                rows.append((rank, "-", "", "", f"no answer: {self._silent[rank]}", mark))
            elif self._waiting.is_waiting(rank) or self._raised_in(rank):
                call = self._raised_in(rank) or self.current(rank)
                rows.append((rank, *call.columns(), call.site, mark))
            else:
                rows.append((rank, "-", "", "", self._place(self._states[rank]), mark))
        return plain_table(("rank", "operation", "dtype", "shape", "called from / now at", ""), rows)

    def _raised_in(self, rank: int) -> CollectiveCall | None:
        """Return the call about which the backend has raised on a rank, which it does not take for open any more."""
        state = self._states[rank]
        is_asker = rank == self._question.rank and self._question.raised
        if not is_asker or state.outstanding or not state.calls:
            return None
        last = state.calls[-1].call
        return state.call(Outstanding(last.group, last.number))

    def _place(self, state: RankState) -> str:
        asked = self._question.outstanding
        last = state.last_call(asked.group) if asked is not None else None
        place = state.position.site
        if last is None:
            return place
        site = f" at {last.site}" if last.site else ""
        return f"{place}, after #{last.number} {last.title}{site}"


def histories(states: Mapping[int, RankState], history: int) -> str:
    """Return a table of the last ``history`` calls of each rank."""
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


# -- Why a collective does not complete: decided from what all ranks have said, by the one rank that asked
# them

# What a backend says that has received other sizes than it expected: shapes that ranks may choose did not fit.
_SIZES = ("ended the process", "data size")
# mismatch: ranks called different things; stall: a rank did not come and does not move;
# slow: it has not come yet, and moves, or data still does: a remark, no error.
Kind = Literal["mismatch", "stall", "slow"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a question."""

    kind: Kind
    text: str  # the report, the same for every rank
    ranks: tuple[int, ...] = ()  # the cause; empty: all are
    lacks_sites: bool = False  # it does not say of each rank where that has called
    may_pass: bool = False  # the ranks said so a moment apart: it holds once it is found twice

    def error(self) -> CollectiveError:
        """Return the error that every rank raises."""
        if self.kind == "slow":
            raise ValueError("a slow rank is no error")
        return (
            CollectiveMismatchError(self.text) if self.kind == "mismatch" else CollectiveStallError(self.text)
        )


def judge(
    question: Question,
    states: Mapping[int, RankState],
    silent: Mapping[int, str],  # why a rank has not answered
    *,
    left: Collection[int] = (),  # silent: their programs have ended, which breaks connections
    running: Collection[int] = (),  # silent: their processes are known to run
    stall_timeout: float = 0.0,  # how long a collective may take that all ranks have called [s]
    history: int = 0,  # how many of the last calls of each rank the report lists
) -> Verdict | None:
    """Return why a collective does not complete; ``None``: the records do not say, or it has completed."""
    case = _Case(question, states, silent, left, running, stall_timeout)
    verdict = case.verdict()
    if verdict is None or not history or verdict.kind == "slow":
        return verdict
    return replace(verdict, text=f"{verdict.text}\n\n{histories(states, history)}")


class _Case:
    """One question and what the ranks have said."""

    def __init__(
        self,
        question: Question,
        states: Mapping[int, RankState],
        silent: Mapping[int, str],
        left: Collection[int],
        running: Collection[int],
        stall_timeout: float,
    ) -> None:
        self.question, self.states, self.silent, self.left = question, states, silent, left
        self.stall_timeout = stall_timeout
        self.waiting = WaitingRanks(states, silent, running)
        self.report = StallReport(question, states, silent, self.waiting, left)

    def verdict(self) -> Verdict | None:
        asker = self.states.get(self.question.rank)
        if asker is None:
            return None
        differing = self._first_difference(asker)
        if differing is None and any(word in self.question.raised for word in _SIZES):
            differing = self._first_difference(asker, with_own_shapes=True)
        if differing is not None:
            return differing
        if self.question.raised:
            # The backend's own error, unless a rank that has left has broken the connections.
            return self._stall(sorted(self.left)) if self.left else None
        if not self._waits(asker):
            return None  # it has gone on meanwhile
        stuck, reached = self.waiting.stuck(), self.waiting.reached_from(asker.rank)
        if asker.rank not in stuck:
            late = [rank for rank in reached if not self.waiting.is_waiting(rank)]
            return Verdict(kind="slow", text=self.report.slow(late), ranks=tuple(late))
        causes = [rank for rank in reached if rank in stuck]
        idle = [rank for rank in causes if not self.waiting.waits_for(rank)]
        if any(rank in self.states and self.states[rank].raised for rank in idle):
            return None  # the backend has raised an error there, about which that rank asks itself
        return self._stall(idle) if idle else self._cycle(asker, causes)

    def _waits(self, state: RankState) -> bool:
        if self.question.outstanding is None:
            return state.is_in_message()
        return self.question.outstanding in state.outstanding

    def _stall(self, causes: Sequence[int]) -> Verdict:
        may_pass = not self.question.raised and not set(causes) <= set(self.silent)
        text = self.report.never_came(causes)
        return Verdict(kind="stall", text=text, ranks=tuple(causes), may_pass=may_pass)

    def _cycle(self, asker: RankState, causes: Sequence[int]) -> Verdict | None:
        outstanding = self.question.outstanding
        alike = members(self.states, outstanding.group) if outstanding is not None else ()
        ranks = sorted({asker.rank, *(causes or filter(self.waiting.is_waiting, alike))})
        calls = as_far_as_known({rank: self.report.current(rank) for rank in ranks})
        if (
            len({(comparison_key(call, exactly=True), call.group, call.number) for call in calls.values()})
            > 1
        ):
            return replace(_mismatch(calls), may_pass=True)
        ranks = sorted({*ranks, *(rank for rank in alike if rank in self.states)})
        since = [self.states[rank].seconds_since_call for rank in ranks]
        if any(seconds is not None and seconds < self.stall_timeout for seconds in since):
            return None  # the last of them has come only now
        if any(self.states[rank].transfers for rank in ranks):
            return Verdict(kind="slow", text=self.report.transfers())
        return Verdict(kind="stall", text=self.report.does_not_complete(ranks), may_pass=True)

    def _first_difference(self, asker: RankState, *, with_own_shapes: bool = False) -> Verdict | None:
        """Return the first collective that its ranks called differently."""
        # It is of a group in which the asker waits, or one of those that it waits for. ``with_own_shapes``:
        # shapes count, too, that ranks may choose, as in an all-to-all.
        reached = [self.states[rank] for rank in self.waiting.reached_from(asker.rank) if rank in self.states]
        groups = [one.group for state in (asker, *reached) for one in state.outstanding]
        if self.question.raised:
            groups += [one.call.group for one in reversed(asker.calls)]
        open_calls = self._open_calls(asker)
        for group in dict.fromkeys(groups):
            by_rank = {rank: s.calls_of(group) for rank, s in self.states.items() if group in s.groups}
            if len(by_rank) < 2:
                continue
            for number in sorted(set.intersection(*(set(calls) for calls in by_rank.values()))):
                wanted = Outstanding(group, number)
                calls = as_far_as_known({rank: self.states[rank].call(wanted) for rank in by_rank})
                if _differ(calls.values(), is_open=wanted in open_calls, with_own_shapes=with_own_shapes):
                    return _mismatch(calls)
        return None

    def _open_calls(self, asker: RankState) -> set[Outstanding]:
        """Return the calls that are not complete on some rank, and the one about which the backend has raised.

        A backend may take a call for done that it has raised an error about.
        """
        found = {one for state in self.states.values() for one in state.outstanding}
        if self.question.raised:
            calls = [one for state in self.states.values() for one in state.calls if not one.done]
            calls += sorted(asker.calls, key=lambda one: one.started)[-1:]
            found |= {Outstanding(one.call.group, one.call.number) for one in calls}
        return found


def _differ(calls: Collection[CollectiveCall], *, is_open: bool, with_own_shapes: bool) -> bool:
    """Return whether calls cannot belong together; of those that are complete on all ranks, less is asked."""
    if with_own_shapes and is_open:
        return len({call.compared() for call in calls}) > 1
    return len({comparison_key(call, exactly=is_open) for call in calls}) > 1


def _mismatch(calls: Mapping[int, CollectiveCall]) -> Verdict:
    return Verdict(
        kind="mismatch",
        text=mismatch_report(calls),
        ranks=odd_ones(calls),
        lacks_sites=not all(call.site for call in calls.values()),
    )
