"""What is said of a collective that does not complete though nobody has called another one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_lockstep._tables import plain_table
from lightning_lockstep._text import first_line, ranks_in_words
from lightning_lockstep.distributed.guard.calls.call_report import CollectiveCall
from lightning_lockstep.distributed.guard.calls.recorded import Outstanding
from lightning_lockstep.distributed.guard.inquiry.question import Question
from lightning_lockstep.distributed.guard.inquiry.rank_state import RankState
from lightning_lockstep.distributed.guard.inquiry.waiting_ranks import WaitingRanks

__all__ = ["StallReport", "histories"]

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
    ) -> None:
        self._question, self._states, self._silent, self._waiting = question, states, silent, waiting

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
        if self._question.raised:
            reason = first_line(self._question.raised)
            waited = f"the wait of rank {self._question.rank} was ended by {reason}"
        text = f"{ranks_in_words(causes)} never came to {self._what()}: {waited}\n\n{self._table(causes)}"
        for rank in causes:
            if rank in self._states and self._states[rank].position.stack:
                stack = "\n".join(f"      {place}" for place in self._states[rank].position.stack)
                text += f"\n\n    Stack of rank {rank}, innermost first:\n{stack}"
        remedy = (
            "Look at what keeps it there; every rank must call the same collectives. A rank that only needs longer can"
            " be given time by a larger stall_timeout."
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
            elif self._waiting.is_waiting(rank):
                call = self.current(rank)
                rows.append((rank, *call.columns(), call.site, mark))
            else:
                rows.append((rank, "-", "", "", self._place(self._states[rank]), mark))
        return plain_table(("rank", "operation", "dtype", "shape", "called from / now at", ""), rows)

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
