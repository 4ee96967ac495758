"""What every rank had at a step, known to every rank a step later, without a collective.

Each rank posts its entry to rank 0, which passes the list on when all have come. A rank reads the list at a
later step. By then it has long arrived, and no step waits for it, as long as the ranks meet in between, as
they do when gradients are reduced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from lightning_lockstep.distributed.side_channel.base import Message, SideChannel
from lightning_lockstep.errors import CollectiveStallError

__all__ = ["DelayedGather"]

# How often a waiting rank looks whether the channel still lives [s].
_LOOK_EVERY = 0.5


class DelayedGather:
    """Gathers one small entry of every rank for numbered occasions.

    Args:
        channel: The side channel of the run.
        name: Tells several gathers on one channel apart; the same on every rank.
        timeout: Longest wait for the entries of the other ranks [s].

    Ranks: one object on every rank. An occasion costs a message to rank 0 and one back for each rank.
    """

    def __init__(self, channel: SideChannel, *, name: str, timeout: float = 60.0) -> None:
        self.channel, self.timeout = channel, timeout
        self._topic = f"gather/{name}"
        self._coming: dict[int, dict[int, Any]] = {}  # rank 0: entries of occasions that are not complete
        self._complete: dict[int, Sequence[Any] | str] = {}  # or, as text, why there is nothing
        self._news = threading.Condition()
        self._remove = channel.on(self._topic, self._take)

    def post(self, occasion: int, entry: Any) -> None:
        """Send this rank's entry of an occasion and return at once.

        Args:
            occasion: Its number; every rank uses the same ones, in rising order.
            entry: Anything that JSON can hold.

        Ranks: every rank, once for each occasion; waits for nobody.
        """
        if self.channel.rank == 0:
            self._collect(occasion, 0, entry)
        else:
            self.channel.post(self._topic, [occasion, entry], to=0)

    def read(self, occasion: int) -> list[Any]:
        """Return the entries of an occasion in rank order, the same on every rank.

        Raises:
            CollectiveStallError: An entry has not come in time; on every rank that reads.

        Ranks: every rank, after its own :meth:`post`; waits only when an entry is still under way.
        """
        entries = self._complete.pop(occasion, None)  # as a rule it came long ago: no lock is needed
        if entries is None:
            with self._news:
                self._wait(occasion)
                entries = self._complete.pop(occasion)
        if isinstance(entries, str):
            raise CollectiveStallError(entries)
        return list(entries)

    def close(self) -> None:
        """Stop listening.

        Ranks: any rank, alone.
        """
        self._remove()

    def _wait(self, occasion: int) -> None:
        # Rank 0 knows who is missing: give its word time to come, so that all ranks raise the same text.
        patience = self.timeout + (0.0 if self.channel.rank == 0 else 2.0)
        deadline = time.monotonic() + patience
        while occasion not in self._complete:
            left = deadline - time.monotonic()
            if left <= 0 or not self.channel.usable:
                self._give_up(occasion)
                return
            self._news.wait(min(left, _LOOK_EVERY))

    def _give_up(self, occasion: int) -> None:
        text = f"What every rank has at step {occasion} did not come within {self.timeout:.0f} s"
        if self.channel.rank == 0:
            missing = sorted(set(range(self.channel.world_size)) - set(self._coming.get(occasion, {})))
            text += f": nothing from rank(s) {', '.join(map(str, missing))}."
            self.channel.post(self._topic, [occasion, text])
        else:
            text += ": nothing from rank 0."
        self._complete[occasion] = text

    def _take(self, message: Message) -> None:
        occasion, entry = message.body
        if message.sender != 0:
            self._collect(occasion, message.sender, entry)
        else:
            self._finish(occasion, entry)

    def _collect(self, occasion: int, rank: int, entry: Any) -> None:
        with self._news:
            entries = self._coming.setdefault(occasion, {})
            entries[rank] = entry
            if len(entries) < self.channel.world_size:
                return
            del self._coming[occasion]
        in_order = [entries[rank] for rank in range(self.channel.world_size)]
        self.channel.post(self._topic, [occasion, in_order])
        self._finish(occasion, in_order)

    def _finish(self, occasion: int, entries: Sequence[Any] | str) -> None:
        with self._news:
            self._complete[occasion] = entries
            self._news.notify_all()
