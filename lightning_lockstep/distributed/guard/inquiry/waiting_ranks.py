"""Which rank waits for which, by what each has said of itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_lockstep.distributed.guard.calls.recorded import Outstanding
from lightning_lockstep.distributed.guard.inquiry.rank_state import RankState, members

__all__ = ["WaitingRanks"]


class WaitingRanks:
    """Who waits for whom."""

    def __init__(
        self, states: Mapping[int, RankState], silent: Mapping[int, str], running: Collection[int] = ()
    ) -> None:
        self._states, self._silent, self._running = states, silent, running

    def is_waiting(self, rank: int) -> bool:
        """Return whether a rank is in a collective that is not complete, or in a send or receive."""
        state = self._states.get(rank)
        return state is not None and (bool(state.outstanding) or state.is_in_message())

    def waiting(self) -> list[int]:
        return [rank for rank in sorted(self._states) if self.is_waiting(rank)]

    def waits_for(self, rank: int) -> set[int]:
        """Return the ranks that a rank waits for: those that have not called what it has called."""
        state = self._states.get(rank)
        if state is None:
            return set()
        missing: set[int] = set()
        for outstanding in state.outstanding:
            there = members(self._states, outstanding.group)
            missing |= {
                other for other in there if other != rank and not self._has_called(other, outstanding)
            }
        if not state.outstanding and state.is_in_message():
            missing |= state.peers()
        return missing

    def reached_from(self, rank: int) -> list[int]:
        """Return the ranks that a rank waits for, and those that they wait for, and so on."""
        found: set[int] = set()
        to_visit = [rank]
        while to_visit:
            new = self.waits_for(to_visit.pop()) - found
            found |= new
            to_visit += sorted(new)
        return sorted(found)

    def stuck(self) -> set[int]:
        """Return the ranks that will not go on by themselves: all but those that move, or wait for such alone."""
        going_on = {rank for rank, state in self._states.items() if state.moves and not self.is_waiting(rank)}
        going_on |= set(self._running)
        while True:
            more = {rank for rank in self.waiting() if rank not in going_on and self._follows(rank, going_on)}
            if not more:
                return (set(self._states) | set(self._silent)) - going_on
            going_on |= more

    def _follows(self, rank: int, going_on: set[int]) -> bool:
        """Return whether a rank that waits goes on once others do."""
        waits = self.waits_for(rank)
        if not self._states[rank].outstanding:
            return bool(waits & going_on)  # which of several sends and receives it waits for is not known
        return bool(waits) and waits <= going_on

    def _has_called(self, rank: int, wanted: Outstanding) -> bool:
        return rank in self._states and self._states[rank].has_called(wanted)
