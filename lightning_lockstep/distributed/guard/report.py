"""Why a collective does not complete, decided from the states of all ranks, and the report of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_lockstep._text import first_line, plain_table, ranks_in_words
from lightning_lockstep.distributed.failure.record import places_in_words
from lightning_lockstep.distributed.guard.activity import UnresponsiveRank
from lightning_lockstep.distributed.guard.collective_call import (
    CollectiveCall,
    as_far_as_known,
    comparison_key,
    mismatch_report,
    odd_ones,
)
from lightning_lockstep.distributed.guard.rank_state import (
    DiagnosisRequest,
    RankState,
    WaitingRanks,
    members,
)
from lightning_lockstep.distributed.guard.records import Outstanding
from lightning_lockstep.errors import CollectiveError, CollectiveMismatchError, CollectiveStallError

# -- What is said of a collective that does not complete though nobody has called another one --

# How a rank is marked in the table.
_CAUSE = "<- never came"


class StallReport:
    """The texts for one request."""

    def __init__(
        self,
        request: DiagnosisRequest,
        states: Mapping[int, RankState],
        silent: Mapping[int, UnresponsiveRank],
        waiting: WaitingRanks,
    ) -> None:
        self._request, self._states, self._silent, self._waiting = request, states, silent, waiting

    def slow(self, late: Sequence[int]) -> str:
        """Return the remark that ranks are late and at work."""
        asker = self._states[self._request.rank]
        where = "; ".join(self._work(rank) for rank in late)
        return (
            f"rank {asker.rank} has waited {self._request.seconds:.0f} s in {self._what()} at {asker.position.site}"
            f" for {ranks_in_words(late)}. {where}. No error is raised while it makes progress."
        )

    def transfers(self) -> str:
        """Return the remark that all ranks are in a collective, whose data is still on its way."""
        asker = self._states[self._request.rank]
        return (
            f"rank {asker.rank} has waited {self._request.seconds:.0f} s in {self._what()} at {asker.position.site}."
            " All its ranks have made the same call, and data moves between them. No error is raised as long as it"
            " does."
        )

    def never_came(self, causes: Sequence[int]) -> str:
        """Return the report of ranks that did not come to a collective and do not move."""
        waited = f"{ranks_in_words(self._waiting.waiting())} waited {self._request.seconds:.0f} s"
        has_left = all(rank in self._silent and self._silent[rank].has_left for rank in causes)
        if has_left:  # what the backend says of the closed connection tells of a crash
            waited = f"the program there has ended while rank {self._request.rank} waited"
        elif self._request.raised:
            reason = first_line(self._request.raised)
            waited = f"the wait of rank {self._request.rank} was ended by {reason}"
        text = f"{ranks_in_words(causes)} never came to {self._what()}: {waited}"
        text += f"\n\n{self._table(causes)}{self._places()}"
        for rank in causes:
            if rank in self._states and self._states[rank].position.stack:
                stack = "\n".join(f"      {place}" for place in self._states[rank].position.stack)
                text += f"\n\n    Stack of rank {rank} (innermost frame last):\n{stack}"
        if has_left:
            remedy = (
                "That program ended after fewer collectives than the others: look for a call that it skipped, or a loop"
                " that was shorter there, such as over fewer batches."
            )
        elif set(causes) <= set(self._silent):
            remedy = (
                "Look at each silent process and its host. One that is stopped (Ctrl-Z, a debugger, SIGSTOP) goes on"
                " after: kill -CONT with its number."
            )
        else:
            remedy = (
                "Look at what keeps it there: every rank must call the same collectives. If it only needs longer, give"
                " the strategy a larger stall_timeout."
            )
        return f"{text}\n\n{remedy}"

    def does_not_complete(self, ranks: Sequence[int]) -> str:
        """Return the report of a collective for which all ranks have made the same call."""
        return (
            f"{self._what()} does not complete though {ranks_in_words(ranks)} have made the same call,"
            f" {self._request.seconds:.0f} s ago\n\n{self._table(())}{self._places()}\n\n"
            "Look at the network between the hosts (lockstep-doctor network), or at what else runs on other threads. If"
            " the transfer only needs longer, give the strategy a larger stall_timeout."
        )

    def _places(self) -> str:
        places = places_in_words({rank: state.where for rank, state in self._states.items()})
        return f"\n\n{places}" if places else ""

    def current(self, rank: int) -> CollectiveCall:
        """Return the call in which a rank waits."""
        state = self._states[rank]
        asked = self._request.outstanding
        return state.call(asked if asked and asked in state.outstanding else state.outstanding[0])

    def _work(self, rank: int) -> str:
        if rank in self._states:
            return f"rank {rank} is still running, at {self._states[rank].position.site}"
        return f"rank {rank} cannot say where it is: {self._silent[rank].reason}"

    def _asked(self) -> Outstanding | None:
        """Return the collective that the request is about, if any is known."""
        asker = self._states[self._request.rank]
        if self._request.outstanding is None and self._request.raised and asker.calls:
            last = asker.calls[-1].call
            return Outstanding(last.group, last.number)
        return self._request.outstanding

    def _what(self) -> str:
        asked = self._asked()
        if asked is None:
            return "a collective"
        call = self._states[self._request.rank].call(asked)
        return f"collective #{asked.number} of group {asked.group!r} ({call.title})"

    def _table(self, causes: Collection[int]) -> str:
        rows: list[tuple[object, ...]] = []
        for rank in sorted({*self._states, *self._silent}):
            mark = _CAUSE if rank in causes else ""
            if rank not in self._states:
                rows.append((rank, "-", "", "", f"no answer: {self._silent[rank].reason}", mark))
            elif self._waiting.is_waiting(rank) or self._raised_in(rank):
                call = self._raised_in(rank) or self.current(rank)
                rows.append((rank, *call.columns(), call.site, mark))
            else:
                rows.append((rank, "-", "", "", self._place(self._states[rank]), mark))
        return plain_table(("rank", "operation", "dtype", "shape", "called from / now at", ""), rows)

    def _raised_in(self, rank: int) -> CollectiveCall | None:
        """Return the call about which the backend has raised on a rank, which it does not take for open any more."""
        state = self._states[rank]
        is_asker = rank == self._request.rank and self._request.raised
        if not is_asker or state.outstanding or not state.calls:
            return None
        last = state.calls[-1].call
        return state.call(Outstanding(last.group, last.number))

    def _place(self, state: RankState) -> str:
        asked = self._request.outstanding
        last = state.last_call(asked.group) if asked is not None else None
        place = state.position.site
        if last is None:
            return place
        site = f" at {last.site}" if last.site else ""
        return f"{place}, after #{last.number} {last.title}{site}"


# -- The decision, from what all ranks have said --

# What a backend says that has received other sizes than it expected: shapes that ranks may choose did not fit.
_SIZES = ("ended the process", "data size")
# mismatch: ranks called different things; stall: a rank did not come and does not move;
# slow: it has not come yet, and moves, or data still does: a remark, no error.
Kind = Literal["mismatch", "stall", "slow"]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What became of a request."""

    kind: Kind
    text: str  # the report, the same for every rank
    ranks: tuple[int, ...] = ()  # the cause; empty: all are
    lacks_sites: bool = False  # it does not say of each rank where that has called
    may_pass: bool = False  # the ranks said so a moment apart: it holds once it is found twice
    verify_finds_it: bool = False  # and before it is called

    def error(self) -> CollectiveError:
        """Return the error that every rank raises."""
        if self.kind == "slow":
            raise ValueError("a slow rank is no error")
        return (
            CollectiveMismatchError(self.text) if self.kind == "mismatch" else CollectiveStallError(self.text)
        )


def diagnose(
    request: DiagnosisRequest,
    states: Mapping[int, RankState],
    silent: Mapping[int, UnresponsiveRank],  # the ranks that have not answered
    *,
    stall_timeout: float = 0.0,  # how long a collective may take that all ranks have called [s]
) -> Diagnosis | None:
    """Return why a collective does not complete; ``None``: the records do not say, or it has completed."""
    if request.rank not in states:
        return None
    found = _Case(request, states, silent, stall_timeout).diagnosis()
    if found is None or any(rank in silent and silent[rank].has_ended for rank in found.ranks):
        return None  # what has ended is a failure, which is reported as such
    return found


class _Case:
    """One request and what the ranks have said."""

    def __init__(
        self,
        request: DiagnosisRequest,
        states: Mapping[int, RankState],
        silent: Mapping[int, UnresponsiveRank],
        stall_timeout: float,
    ) -> None:
        self.request, self.states, self.silent = request, states, silent
        self.asker, self.stall_timeout = states[request.rank], stall_timeout
        self.waiting = WaitingRanks(states, silent)
        self.report = StallReport(request, states, silent, self.waiting)

    def diagnosis(self) -> Diagnosis | None:
        differing = self._first_difference()
        if differing is None and any(word in self.request.raised for word in _SIZES):
            differing = self._first_difference(with_own_shapes=True)
        if differing is not None:
            return differing
        if self.request.raised:
            # The backend's own error, unless a rank that has left has broken the connections.
            gone = [rank for rank, one in self.silent.items() if one.has_left]
            return self._stall(sorted(gone)) if gone else None
        if self.request.outstanding not in self.asker.outstanding:
            return None  # it has gone on meanwhile
        stuck, reached = self.waiting.stuck(), self.waiting.reached_from(self.asker.rank)
        if self.asker.rank not in stuck:
            late = [rank for rank in reached if not self.waiting.is_waiting(rank)]
            return Diagnosis(kind="slow", text=self.report.slow(late), ranks=tuple(late))
        causes = [rank for rank in reached if rank in stuck]
        idle = [rank for rank in causes if not self.waiting.waits_for(rank)]
        if any(rank in self.states and self.states[rank].raised for rank in idle):
            return None  # the backend has raised an error there, about which that rank asks itself
        return self._stall(idle) if idle else self._cycle(causes)

    def _stall(self, causes: Sequence[int]) -> Diagnosis:
        may_pass = not self.request.raised and not set(causes) <= set(self.silent)
        text = self.report.never_came(causes)
        return Diagnosis(kind="stall", text=text, ranks=tuple(causes), may_pass=may_pass)

    def _cycle(self, causes: Sequence[int]) -> Diagnosis | None:
        outstanding = self.request.outstanding
        alike = members(self.states, outstanding.group) if outstanding is not None else ()
        ranks = sorted({self.asker.rank, *(causes or filter(self.waiting.is_waiting, alike))})
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
        if any(self.states[rank].moves for rank in ranks):
            return Diagnosis(kind="slow", text=self.report.transfers())
        return Diagnosis(kind="stall", text=self.report.does_not_complete(ranks), may_pass=True)

    def _first_difference(self, *, with_own_shapes: bool = False) -> Diagnosis | None:
        """Return the first collective that its ranks called differently."""
        # It is of a group in which the asker waits, or one of those that it waits for. ``with_own_shapes``:
        # shapes count, too, that ranks may choose, as in an all-to-all.
        reached = self.waiting.reached_from(self.asker.rank)
        waiting = (self.asker, *(self.states[rank] for rank in reached if rank in self.states))
        groups = [one.group for state in waiting for one in state.outstanding]
        if self.request.raised:
            groups += [one.call.group for one in reversed(self.asker.calls)]
        open_calls = self._open_calls()
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

    def _open_calls(self) -> set[Outstanding]:
        """Return the calls that are not complete on some rank, and the one about which the backend has raised."""
        # A backend may take a call for done that it has raised an error about.
        found = {one for state in self.states.values() for one in state.outstanding}
        if self.request.raised:
            calls = [one for state in self.states.values() for one in state.calls if not one.done]
            calls += sorted(self.asker.calls, key=lambda one: one.started)[-1:]
            found |= {Outstanding(one.call.group, one.call.number) for one in calls}
        return found


def _differ(calls: Collection[CollectiveCall], *, is_open: bool, with_own_shapes: bool) -> bool:
    """Return whether calls cannot belong together; of those that are complete on all ranks, less is asked."""
    if with_own_shapes and is_open:
        return len({call.compared() for call in calls}) > 1
    return len({comparison_key(call, exactly=is_open) for call in calls}) > 1


def _mismatch(calls: Mapping[int, CollectiveCall]) -> Diagnosis:
    return Diagnosis(
        kind="mismatch",
        text=mismatch_report(calls),
        ranks=odd_ones(calls),
        verify_finds_it=any(call.number for call in calls.values()),
        lacks_sites=not all(call.site for call in calls.values()),
    )
