"""One rank after the other, without a barrier a rank and without a hang when one of them fails.

Rank 0 keeps the list: a rank that comes, and a rank that is done, tells rank 0, which tells the next one to
go and, at the end, tells all how it went. All of it travels over the side channel.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_lockstep.distributed.communicator import Communicator
from lightning_lockstep.distributed.side_channel.base import Message, SideChannel
from lightning_lockstep.errors import CollectiveStallError, RankFailedError

__all__ = ["RankOrderedSections", "rank_ordered_sections"]

_TOPIC = "turns"
_LOOK_EVERY = 0.5
Queue = Literal["all", "node"]


@dataclass
class _Round:
    """What rank 0 knows of one round."""

    came: dict[int, str] = field(default_factory=dict)  # rank -> the queue it stands in
    done: dict[int, str] = field(default_factory=dict)  # rank -> what went wrong, or ""
    told_to_go: set[int] = field(default_factory=set)


class RankOrderedSections:
    """Gives ranks their turn, in rank order, round after round.

    Args:
        communicator: The communicator of the run.

    Ranks: one object on every rank; a round costs 4 messages a rank.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.channel: SideChannel = communicator.side_channel
        self._number = 0
        self._rounds: dict[int, _Round] = {}
        self._told: dict[tuple[int, str], Any] = {}
        self._news = threading.Condition()
        self.channel.on(_TOPIC, self._take)

    def wait_for_turn(self, *, queue: Queue, timeout: float) -> int:
        """Wait until it is this rank's turn and return the number of the round.

        Args:
            queue: ``all`` is one rank after the other; ``node`` is one rank of each node at a time.
            timeout: Longest wait [s].

        Raises:
            RankFailedError: A rank that had its turn before failed.
            CollectiveStallError: The turn did not come in time.

        Ranks: every rank.
        """
        number, self._number = self._number, self._number + 1
        here = f"{self.communicator.node_rank} {self.communicator.host}"
        place = "all" if queue == "all" else f"node {here}"
        self._tell(number, "came", place)
        failed = self._hear(number, "go", timeout)
        if failed:
            self._tell(number, "done", "")
            self._raise(failed)
        return number

    def finish(self, number: int, *, error: str, timeout: float) -> None:
        """Give the turn away, wait until all have had theirs, and see that all end alike.

        Args:
            number: What :meth:`wait_for_turn` returned.
            error: What went wrong here, with its traceback; empty if nothing did.
            timeout: Longest wait for the other ranks [s].

        Raises:
            RankFailedError: Another rank failed.
            CollectiveStallError: A rank did not come or is still busy.

        Ranks: every rank that got its turn.
        """
        self._tell(number, "done", error)
        failed = self._hear(number, "over", timeout)
        if failed and not error:
            self._raise(failed)

    def _raise(self, failed: dict[str, str]) -> None:
        rank, text = min(failed.items(), key=lambda item: int(item[0]))
        first = text.rstrip().splitlines()[-1] if text.strip() else "no reason given"
        raise RankFailedError(f"rank {rank} failed while it was its turn: {first}\n\n{text.rstrip()}")

    def _tell(self, number: int, what: str, text: str) -> None:
        if self.channel.rank == 0:
            self._keep_list(number, 0, what, text)
        else:
            self.channel.post(_TOPIC, [number, what, text], to=0)

    def _hear(self, number: int, what: str, timeout: float) -> dict[str, str]:
        deadline = time.monotonic() + timeout
        asked = False
        with self._news:
            while (number, what) not in self._told:
                left = deadline - time.monotonic()
                if left <= 0 and not asked:
                    # Rank 0 knows whom all are waiting for.
                    asked, deadline = True, time.monotonic() + 2.0
                    self._tell(number, "why", "")
                elif left <= 0 or not self.channel.usable:
                    why = self._told.get((number, "why"), "rank 0 does not answer")
                    raise CollectiveStallError(
                        f"rank {self.channel.rank} waited {timeout:.0f} s in in_rank_order(): {why}."
                        " Every rank must enter the block; a longer `timeout` gives slow ranks more time."
                    )
                self._news.wait(max(0.0, min(left, _LOOK_EVERY)))
            failed: dict[str, str] = self._told.pop((number, what))
            return failed

    def _take(self, message: Message) -> None:
        number, what, content = message.body
        if what in ("go", "over", "why") and message.sender == 0 and not (what == "why" and content == ""):
            self._be_told(number, what, content)
        else:
            self._keep_list(number, message.sender, what, content)

    def _be_told(self, number: int, what: str, content: Any) -> None:
        with self._news:
            self._told[number, what] = content
            self._news.notify_all()

    def _keep_list(self, number: int, rank: int, what: str, text: str) -> None:
        with self._news:
            round_ = self._rounds.setdefault(number, _Round())
            if what == "why":
                self._answer(number, rank, "why", self._who_is_missing(round_))
                return
            (round_.came if what == "came" else round_.done)[rank] = text
            failed = {str(r): error for r, error in round_.done.items() if error}
            for ready in self._ready(round_, bool(failed)):
                round_.told_to_go.add(ready)
                self._answer(number, ready, "go", failed)
            if len(round_.done) == self.channel.world_size:
                del self._rounds[number]
                for every in range(self.channel.world_size):
                    self._answer(number, every, "over", failed)

    def _ready(self, round_: _Round, failed: bool) -> list[int]:
        """Return the ranks that may go on now: the next of each queue, or all once one has failed."""
        waiting = [rank for rank in sorted(round_.came) if rank not in round_.told_to_go]
        if failed:
            return waiting
        ready = []
        for rank in waiting:
            queue = round_.came[rank]
            busy = any(
                r in round_.told_to_go and r not in round_.done for r, q in round_.came.items() if q == queue
            )
            first = not any(r < rank and round_.came[r] == queue for r in waiting)
            in_turn = queue != "all" or all(r in round_.done for r in range(rank))
            if first and not busy and in_turn:
                ready.append(rank)
        return ready

    def _answer(self, number: int, rank: int, what: str, content: Any) -> None:
        if rank == 0:
            self._be_told(number, what, content)
        else:
            self.channel.post(_TOPIC, [number, what, content], to=rank)

    def _who_is_missing(self, round_: _Round) -> str:
        everyone = set(range(self.channel.world_size))
        busy = sorted(round_.told_to_go - set(round_.done))
        absent = sorted(everyone - set(round_.came))
        parts = []
        if busy:
            parts.append(f"rank(s) {', '.join(map(str, busy))} still in the block")
        if absent:
            parts.append(f"rank(s) {', '.join(map(str, absent))} never came to it")
        return " and ".join(parts) or "the last word was just on its way"


_turns: tuple[Communicator, RankOrderedSections] | None = None


def rank_ordered_sections(communicator: Communicator) -> RankOrderedSections:
    """Return the turns of a communicator; the same object while it is the current one.

    Ranks: every rank, for itself; nothing is sent.
    """
    global _turns
    if _turns is None or _turns[0] is not communicator:
        _turns = (communicator, RankOrderedSections(communicator))
    return _turns[1]
