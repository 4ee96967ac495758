"""A section of code that ranks enter one after the other, without a barrier and without a hang when one fails.

Rank 0 coordinates: each rank tells it when it arrives at the section and when it has left it. Rank 0 lets the
next one enter and, once all have left, tells everyone how it went. All messages use the side channel.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_lockstep.distributed.communicator import Communicator
from lightning_lockstep.distributed.side_channel.base import Message, SideChannel
from lightning_lockstep.errors import CollectiveStallError, RankFailedError

__all__ = ["RankOrderedSections", "rank_ordered_sections"]

_TOPIC = "rank_order"
# How long rank 0 may take to say which ranks the others wait for [s].
_ANSWER_LIMIT = 2.0
Queue = Literal["all", "node"]


@dataclass
class _Section:
    """What rank 0 knows of one section."""

    arrived: dict[int, str] = field(default_factory=dict)  # rank -> the queue in which it waits
    left: dict[int, str] = field(default_factory=dict)  # rank -> its error, or ""
    admitted: set[int] = field(default_factory=set)


class RankOrderedSections:
    """Lets ranks enter a section in rank order, one section after another.

    Args:
        communicator: The communicator of the run.

    Ranks: one object on every rank; a section costs 4 messages per rank.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.channel: SideChannel = communicator.side_channel
        self._number = 0
        self._sections: dict[int, _Section] = {}
        self._answers: dict[tuple[int, str], Any] = {}
        self._news = threading.Condition()
        self.channel.on(_TOPIC, self._take)

    def enter(self, *, queue: Queue, timeout: float) -> int:
        """Wait until this rank may enter the section, and return the section's number.

        Args:
            queue: ``all`` admits one rank after the other; ``node`` one rank of each node at a time.
            timeout: Longest wait [s].

        Raises:
            RankFailedError: A rank that entered before failed.
            CollectiveStallError: The ranks before did not arrive or leave in time.

        Ranks: every rank.
        """
        number, self._number = self._number, self._number + 1
        node = f"node {self.communicator.node_rank} {self.communicator.host}"
        self._send(number, "arrived", "all" if queue == "all" else node)
        failed = self._receive(number, "enter", timeout)
        if failed:
            self._send(number, "left", "")
            self._raise(failed)
        return number

    def leave(self, number: int, *, error: str, timeout: float) -> None:
        """Admit the next rank, wait until all have left, and see that all end alike.

        Args:
            number: What :meth:`enter` returned.
            error: What went wrong here, with its traceback; empty if nothing did.
            timeout: Longest wait for the other ranks [s].

        Raises:
            RankFailedError: Another rank failed.
            CollectiveStallError: A rank did not arrive or has not left.

        Ranks: every rank that has entered.
        """
        self._send(number, "left", error)
        failed = self._receive(number, "all left", timeout)
        if failed and not error:
            self._raise(failed)

    def _raise(self, failed: dict[str, str]) -> None:
        rank, text = min(failed.items(), key=lambda item: int(item[0]))
        summary = text.rstrip().splitlines()[-1] if text.strip() else "no reason given"
        raise RankFailedError(f"rank {rank} failed in in_rank_order(): {summary}\n\n{text.rstrip()}")

    def _send(self, number: int, what: str, text: str) -> None:
        if self.channel.rank == 0:
            self._coordinate(number, 0, what, text)
        else:
            self.channel.post(_TOPIC, [number, what, text], to=0)

    def _receive(self, number: int, what: str, timeout: float) -> dict[str, str]:
        def arrived() -> bool:
            return (number, what) in self._answers

        with self._news:
            if not self.channel.wait_for(self._news, arrived, timeout):
                self._send(number, "who is missing", "")  # rank 0 knows
                if not self.channel.wait_for(self._news, arrived, _ANSWER_LIMIT):
                    missing = self._answers.get((number, "missing"), "rank 0 does not answer")
                    raise CollectiveStallError(
                        f"rank {self.channel.rank} waited {timeout:.0f} s in in_rank_order(): {missing}."
                        " Every rank must enter the block; a longer `timeout` gives slow ranks more time."
                    )
            failed: dict[str, str] = self._answers.pop((number, what))
            return failed

    def _take(self, message: Message) -> None:
        number, what, content = message.body
        if what in ("enter", "all left", "missing"):
            self._keep_answer(number, what, content)
        else:
            self._coordinate(number, message.sender, what, content)

    def _keep_answer(self, number: int, what: str, content: Any) -> None:
        with self._news:
            self._answers[number, what] = content
            self._news.notify_all()

    def _coordinate(self, number: int, rank: int, what: str, text: str) -> None:
        with self._news:
            section = self._sections.setdefault(number, _Section())
            if what == "who is missing":
                self._answer(number, rank, "missing", self._missing(section))
                return
            (section.arrived if what == "arrived" else section.left)[rank] = text
            failed = {str(r): error for r, error in section.left.items() if error}
            for ready in self._ready(section, bool(failed)):
                section.admitted.add(ready)
                self._answer(number, ready, "enter", failed)
            if len(section.left) == self.channel.world_size:
                del self._sections[number]
                for every in range(self.channel.world_size):
                    self._answer(number, every, "all left", failed)

    def _ready(self, section: _Section, failed: bool) -> list[int]:
        """Return the ranks that may enter now: the next of each queue, or all once one has failed."""
        waiting = [rank for rank in sorted(section.arrived) if rank not in section.admitted]
        if failed:
            return waiting
        inside = {section.arrived[rank] for rank in section.admitted if rank not in section.left}
        ready = []
        for rank in waiting:
            queue = section.arrived[rank]
            first = not any(r < rank and section.arrived[r] == queue for r in waiting)
            in_order = queue != "all" or all(r in section.left for r in range(rank))
            if first and queue not in inside and in_order:
                ready.append(rank)
        return ready

    def _answer(self, number: int, rank: int, what: str, content: Any) -> None:
        if rank == 0:
            self._keep_answer(number, what, content)
        else:
            self.channel.post(_TOPIC, [number, what, content], to=rank)

    def _missing(self, section: _Section) -> str:
        busy = sorted(section.admitted - set(section.left))
        absent = sorted(set(range(self.channel.world_size)) - set(section.arrived))
        parts = []
        if busy:
            parts.append(f"rank(s) {', '.join(map(str, busy))} still in the block")
        if absent:
            parts.append(f"rank(s) {', '.join(map(str, absent))} never came to it")
        return " and ".join(parts) or "all ranks had arrived; the release message was still in flight"


_sections: tuple[Communicator, RankOrderedSections] | None = None


def rank_ordered_sections(communicator: Communicator) -> RankOrderedSections:
    """Return the rank-ordered sections of a communicator; the same object while it is the current one.

    Ranks: every rank, for itself; nothing is sent.
    """
    global _sections
    if _sections is None or _sections[0] is not communicator:
        _sections = (communicator, RankOrderedSections(communicator))
    return _sections[1]
