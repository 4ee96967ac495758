"""Why a collective does not complete, decided from the states of all ranks, and the report of it.

is there a collective that ranks have called differently?    mismatch
has the backend raised an error about it?                    stall, if a rank has left; else that error stands
has the asker gone on meanwhile?                             nothing
does each rank that the asker waits for move, or go on?      slow: a remark
does one of them neither move nor wait for anybody?          stall: it never came
else they wait for each other. Are their calls the same?     no: mismatch. Data moves: slow. Otherwise: stall

The states are of different moments, so that a finding may have to be found again (``may_pass``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from lightning_lockstep._text import first_line, plain_table, ranks_in_words
from lightning_lockstep.distributed.failure.record import places_in_words
from lightning_lockstep.distributed.guard.collective_call import (
    ALL_TO_ALL,
    CollectiveCall,
    mismatch_report,
    odd_ones,
)
from lightning_lockstep.distributed.guard.rank_state import (
    DiagnosisRequest,
    Outstanding,
    RankState,
    UnresponsiveRank,
)
from lightning_lockstep.errors import CollectiveError, CollectiveMismatchError, CollectiveStallError

# What an error says if a rank has received another size than it expected: shapes that ranks may choose did not fit.
_SIZES = ("ended the process", "data size")
# How the table marks a rank that is the cause.
_CAUSE = "<- never came"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of a request."""

    # mismatch: ranks called different things. stall: a rank did not come and does not move, or no data moves.
    # slow: the rank that did not come moves, or data does; this is a remark, no error.
    kind: Literal["mismatch", "stall", "slow"]
    text: str  # the report, the same for every rank
    ranks: tuple[int, ...] = ()  # those that are the cause; empty if all are
    may_pass: bool = False  # the states are of different moments, so it holds only if found again

    def error(self) -> CollectiveError:
        """Return the error that every rank raises; not for the kind "slow"."""
        kind = CollectiveMismatchError if self.kind == "mismatch" else CollectiveStallError
        return kind(self.text)


def diagnose(
    request: DiagnosisRequest,
    states: Mapping[int, RankState],
    silent: Mapping[int, UnresponsiveRank],  # the ranks that have not answered
    *,
    stall_timeout: float = 0.0,  # how long a collective may take once all ranks have called it [s]
) -> Diagnosis | None:
    """Return why a collective does not complete, or ``None`` if the records do not tell or it has completed."""
    if request.rank not in states:
        return None
    found = _Case(request, states, silent, stall_timeout).diagnosis()
    if found is None or any(rank in silent and silent[rank].has_ended for rank in found.ranks):
        return None  # the end of a process is a failure, which is reported as such
    return found


# -- The decision, from the states of all ranks --


class _Case:
    """A request of a rank, with the states of all ranks that were found for it."""

    def __init__(
        self,
        request: DiagnosisRequest,
        states: Mapping[int, RankState],
        silent: Mapping[int, UnresponsiveRank],
        stall_timeout: float,
    ) -> None:
        self.request, self.states, self.silent = request, states, silent
        self.asker, self.stall_timeout = states[request.rank], stall_timeout
        self.asked = request.outstanding
        if self.asked is None and request.raised and self.asker.calls:
            last = self.asker.calls[-1].call  # the backend has raised about this one
            self.asked = Outstanding(last.group, last.number)
        #: Of each rank in a collective that is not complete, the ranks that have not called what it has called.
        self.waits: dict[int, set[int]] = {}
        missing = {one: self._missing(one) for state in states.values() for one in state.outstanding}
        for rank, state in sorted(states.items()):
            if state.outstanding:
                self.waits[rank] = set[int]().union(*map(missing.__getitem__, state.outstanding)) - {rank}

    def diagnosis(self) -> Diagnosis | None:
        differing = self._first_difference()
        if differing is None and any(word in self.request.raised for word in _SIZES):
            differing = self._first_difference(with_own_shapes=True)
        if differing is not None:
            return differing
        if self.request.raised:
            # A rank that has left has broken the connections; without one, the backend's own error stands.
            gone = [rank for rank, one in self.silent.items() if one.has_left]
            return self._never_came(sorted(gone)) if gone else None
        if self.request.outstanding not in self.asker.outstanding:
            return None  # the asker has gone on meanwhile
        stuck, reached = self._stuck(), self._reached_from(self.asker.rank)
        if self.asker.rank not in stuck:
            late = [rank for rank in reached if rank not in self.waits]
            where = "; ".join(map(self._progress_in_words, late))
            text = f" for {ranks_in_words(late)}. {where}. No error is raised while it makes progress."
            return self._remark(text, late)
        causes = [rank for rank in reached if rank in stuck]
        idle = [rank for rank in causes if not self.waits.get(rank)]
        if any(rank in self.states and self.states[rank].raised for rank in idle):
            return None  # the backend has raised an error there, and that rank asks about it
        return self._never_came(idle) if idle else self._cycle(causes)

    def _cycle(self, causes: Sequence[int]) -> Diagnosis | None:
        members = self._members(self.asked.group) if self.asked is not None else ()
        # If the asker waits for no rank, all have called its collective: then those of its group that are still in one.
        waiting = causes or [rank for rank in members if rank in self.waits]
        ranks = sorted({self.asker.rank, *waiting})
        calls = _as_far_as_known({rank: self._call_of(rank) for rank in ranks})
        kinds = {(_comparison_key(call, exactly=True), call.group, call.number) for call in calls.values()}
        if len(kinds) > 1:
            return replace(_mismatch(calls), may_pass=True)
        ranks = sorted({*ranks, *(rank for rank in members if rank in self.states)})
        since = [self.states[rank].seconds_since_call for rank in ranks]
        if any(seconds is not None and seconds < self.stall_timeout for seconds in since):
            return None  # the last of them has only just made the call
        if any(self.states[rank].moves for rank in ranks):
            return self._remark(
                ". All its ranks have made the same call. No error is raised while data moves between them."
            )
        text = (
            f"{self._collective_in_words()} does not complete, although {ranks_in_words(ranks)} made the same call"
            f" {self.request.seconds:.0f} s ago\n\n{self._table_of_ranks(())}{self._where_in_training()}\n\n"
            "Look at the network between the hosts (lockstep-doctor network), and at what other threads do. If the"
            " transfer only needs longer, give the strategy a larger stall_timeout."
        )
        return Diagnosis(kind="stall", text=text, may_pass=True)

    def _first_difference(self, *, with_own_shapes: bool = False) -> Diagnosis | None:
        """Return the first collective that its ranks called differently."""
        # Its group is one in which the asker waits, or a rank that the asker waits for. ``with_own_shapes``: also
        # compare shapes that ranks may choose, as in an all-to-all.
        reached = self._reached_from(self.asker.rank)
        waiting = (self.asker, *(self.states[rank] for rank in reached if rank in self.states))
        groups = [one.group for state in waiting for one in state.outstanding]
        if self.request.raised:
            groups += [one.call.group for one in reversed(self.asker.calls)]
        open_calls = self._open_calls()
        for group in dict.fromkeys(groups):
            by_rank = {rank: s.calls_of[group] for rank, s in self.states.items() if group in s.groups}
            if len(by_rank) < 2:
                continue
            for number in sorted(set.intersection(*(set(calls) for calls in by_rank.values()))):
                wanted = Outstanding(group, number)
                calls = _as_far_as_known({rank: self.states[rank].call(wanted) for rank in by_rank})
                if _differ(calls.values(), is_open=wanted in open_calls, with_own_shapes=with_own_shapes):
                    return _mismatch(calls)
        return None

    def _open_calls(self) -> set[Outstanding]:
        """Return the calls that are incomplete on any rank, and the one about which the backend has raised."""
        # A backend may record a call as done although it has raised an error about it.
        found = {one for state in self.states.values() for one in state.outstanding}
        if self.request.raised:
            calls = [one for state in self.states.values() for one in state.calls if not one.done]
            calls += self.asker.calls[-1:]
            found |= {Outstanding(one.call.group, one.call.number) for one in calls}
        return found

    # -- which rank waits for which, by the states of the ranks --

    def _members(self, group: str) -> Sequence[int]:
        """Return the ranks of a group, from any rank that belongs to it."""
        return next((state.groups[group] for state in self.states.values() if group in state.groups), ())

    def _missing(self, wanted: Outstanding) -> set[int]:
        """Return the ranks that have not called a collective."""
        states, members = self.states, self._members(wanted.group)
        return {rank for rank in members if rank not in states or not states[rank].has_called(wanted)}

    def _reached_from(self, rank: int) -> list[int]:
        """Return the ranks that a rank waits for, and those that they wait for, and so on."""
        found: set[int] = set()
        to_visit = [rank]
        while to_visit:
            new = self.waits.get(to_visit.pop(), set()) - found
            found |= new
            to_visit += sorted(new)
        return sorted(found)

    def _stuck(self) -> set[int]:
        """Return the ranks that will not go on: all but those that move, or that wait only for ranks that go on."""
        going_on = {rank for rank, state in self.states.items() if state.moves and not state.outstanding}
        going_on |= {rank for rank, one in self.silent.items() if one.is_moving}
        waiting = {rank: others for rank, others in self.waits.items() if others}
        while more := {rank for rank, others in waiting.items() if others <= going_on} - going_on:
            going_on |= more
        return (set(self.states) | set(self.silent)) - going_on

    # -- the report of a collective that does not complete although no rank has called another one --

    def _remark(self, text: str, ranks: Sequence[int] = ()) -> Diagnosis:
        begin = (
            f"rank {self.asker.rank} has waited {self.request.seconds:.0f} s in {self._collective_in_words()} at"
            f" {self.asker.position.site}"
        )
        return Diagnosis(kind="slow", text=f"{begin}{text}", ranks=tuple(ranks))

    def _never_came(self, causes: Sequence[int]) -> Diagnosis:
        """Return the report about ranks that did not reach a collective and do not move."""
        waited = f"{ranks_in_words(self.waits)} waited {self.request.seconds:.0f} s"
        has_left = all(rank in self.silent and self.silent[rank].has_left for rank in causes)
        all_silent = set(causes) <= set(self.silent)
        if has_left:  # the backend's error about the closed connection looks like a crash
            waited = f"the program there has ended while rank {self.request.rank} waited"
        elif self.request.raised:
            waited = f"the wait of rank {self.request.rank} was ended by {first_line(self.request.raised)}"
        text = f"{ranks_in_words(causes)} never came to {self._collective_in_words()}: {waited}"
        text += f"\n\n{self._table_of_ranks(causes)}{self._where_in_training()}"
        for rank in causes:
            if rank in self.states and self.states[rank].position.stack:
                stack = "\n".join(f"      {frame}" for frame in self.states[rank].position.stack)
                text += f"\n\n    Stack of rank {rank} (innermost frame last):\n{stack}"
        if has_left:
            remedy = "That program ended earlier than the others: look for a collective that it skipped."
        elif all_silent:
            remedy = "Look at each silent process; one that is stopped (Ctrl-Z, SIGSTOP) continues after kill -CONT."
        else:
            remedy = (
                "Look at what keeps it there: every rank must call the same collectives. If it only needs longer, give"
                " the strategy a larger stall_timeout."
            )
        may_pass = not self.request.raised and not all_silent
        return Diagnosis(kind="stall", text=f"{text}\n\n{remedy}", ranks=tuple(causes), may_pass=may_pass)

    def _where_in_training(self) -> str:
        places = places_in_words({rank: state.where for rank, state in self.states.items()})
        return f"\n\n{places}" if places else ""

    def _call_of(self, rank: int) -> CollectiveCall:
        state = self.states[rank]
        return state.call(self.asked if self.asked in state.outstanding else state.outstanding[0])

    def _progress_in_words(self, rank: int) -> str:
        if rank in self.states:
            return f"rank {rank} is still running, at {self.states[rank].position.site}"
        return f"rank {rank} cannot say where it is: {self.silent[rank].reason}"

    def _collective_in_words(self) -> str:
        if (asked := self.asked) is None:
            return "a collective"
        return f"collective #{asked.number} of group {asked.group!r} ({self.asker.call(asked).title})"

    def _table_of_ranks(self, causes: Collection[int]) -> str:
        rows: list[tuple[object, ...]] = []
        for rank in sorted({*self.states, *self.silent}):
            mark = _CAUSE if rank in causes else ""
            if rank not in self.states:
                rows.append((rank, "-", "", "", f"no answer: {self.silent[rank].reason}", mark))
            elif rank in self.waits or self._raised_in(rank):
                call = self._raised_in(rank) or self._call_of(rank)
                rows.append((rank, *call.columns(), call.site, mark))
            else:
                rows.append((rank, "-", "", "", self._position_in_words(self.states[rank]), mark))
        return plain_table(("rank", "operation", "dtype", "shape", "called from / now at", ""), rows)

    def _raised_in(self, rank: int) -> CollectiveCall | None:
        """Return the call about which the asker's backend has raised, unless it is still recorded as incomplete."""
        state = self.states[rank]
        is_asker = rank == self.request.rank and self.request.raised
        return state.call(self.asked) if is_asker and self.asked and not state.outstanding else None

    def _position_in_words(self, state: RankState) -> str:
        last = state.last_call(self.asked.group) if self.asked is not None else None
        if last is None:
            return state.position.site
        site = f" at {last.site}" if last.site else ""
        return f"{state.position.site}, after #{last.number} {last.title}{site}"


# -- What calls of ranks must have in common, as far as their records tell --

# Operations whose shapes may differ between ranks, by the names that backends give them.
_OWN_SHAPES = {*ALL_TO_ALL, "scatter"}


def _mismatch(calls: Mapping[int, CollectiveCall]) -> Diagnosis:
    return Diagnosis(kind="mismatch", text=mismatch_report(calls), ranks=odd_ones(calls))


def _differ(calls: Collection[CollectiveCall], *, is_open: bool, with_own_shapes: bool) -> bool:
    """Return whether calls cannot be one collective; less must be equal if they are complete on all ranks."""
    if with_own_shapes and is_open:
        return len({call.compared() for call in calls}) > 1
    return len({_comparison_key(call, exactly=is_open) for call in calls}) > 1


def _as_far_as_known(calls: Mapping[int, CollectiveCall]) -> dict[int, CollectiveCall]:
    """Return the calls without what is not known of every rank that called the same operation."""
    peers: dict[str, list[CollectiveCall]] = {}
    for call in calls.values():
        peers.setdefault(call.operation, []).append(call)
    cleared = {operation: _cleared_fields(those) for operation, those in peers.items()}
    return {rank: replace(call, **cleared[call.operation]) for rank, call in calls.items()}


def _cleared_fields(peers: Sequence[CollectiveCall]) -> dict[str, Any]:
    # The position of a rank that has gone on no longer tells its reduction and root, and in a scatter only the root
    # records tensors. Known roots that differ are kept.
    found: dict[str, Any] = {}
    roots = {call.root for call in peers}
    if any(call.reduce_op is None for call in peers):
        found["reduce_op"] = None
    if None in roots and len(roots) <= 2:
        found["root"] = None
    if peers[0].operation == "scatter" and not all(call.shapes for call in peers):
        found |= {"dtypes": (), "shapes": ()}
    return found


def _comparison_key(call: CollectiveCall, *, exactly: bool) -> tuple[str, ...]:
    """Return what must be equal on all ranks of a call; less if it is complete (not ``exactly``)."""
    own_shapes = call.operation in _OWN_SHAPES
    if exactly:
        columns = call.compared()
        return columns[:2] if own_shapes else columns
    sizes = "" if own_shapes else str([prod(shape) for shape in call.shapes])
    return call.operation, ",".join(call.dtypes), sizes
