"""One entry of every rank, gathered over the side channel without a collective.

Each rank posts its entry to rank 0. When all have come, or when rank 0 has waited long enough, all ranks have the same
entries, or rank 0 alone has them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.side_channel.channel import Message, SideChannel
from lightning_lockstep.errors import CollectiveStallError

# How much longer than rank 0 the others wait, so that they receive its list of missing ranks [s].
_RESULT_DELAY = 2.0

# How many calls of each gather are known to the guard.
_KEPT = 20

Key = int | str


@dataclass
class Collecting:
    key: Key
    began: float  # [s since 1970]
    waits: bool = True


@dataclass(frozen=True)
class Gathered:
    """What was collected: entries by rank, the ranks whose entry is missing, and how long was waited at most [s]."""

    # If rank 0 did not answer, only rank 0 counts as missing, because nothing is known of the others.

    entries: Mapping[int, Any]
    missing: tuple[int, ...] = ()
    timeout: float = 0.0

    def complete(self, what: str) -> list[Any]:
        """Return the entries in rank order; a :class:`CollectiveStallError` names the ranks that are missing."""
        if self.missing:
            raise CollectiveStallError(
                f"{what} did not come within {self.timeout:.0f} s: nothing from {ranks_in_words(self.missing)}."
            )
        return list(self.entries.values())


class Gather:
    """Collects one entry of every rank under a key, any number of times. Ranks: one object on every rank."""

    # `name` tells several gathers on one channel apart. A key costs one message of each rank to rank 0, and one back if
    # all ranks get the entries. `watched`: the guard finds out why one does not end, as of a collective.

    def __init__(self, channel: SideChannel, name: str, *, timeout: float = 60.0, watched: bool = False) -> None:
        self.channel, self.name, self.timeout = channel, name, timeout
        self.last: deque[Collecting] = deque(maxlen=_KEPT)
        if watched:
            channel.watched.append(self)
        self._topic = f"gather/{name}"
        self._coming: dict[Key, dict[int, Any]] = {}
        self._complete: dict[Key, Mapping[int, Any]] = {}
        self._overdue: set[Key] = set()  # given up: what still comes is not kept
        self.on_entry: Callable[[], None] = lambda: None  # called on rank 0 when an entry has come
        self._remove = [
            channel.on(self._topic, self._take_entry),
            channel.on(f"{self._topic}/result", self._take_result),
        ]

    def post(self, key: Key, entry: Any, *, for_all: bool = True) -> None:
        """Send this rank's entry, for rank 0 alone or for all, and return at once. Ranks: every rank."""
        # A key names one collection, the same on every rank, and is never used again.
        self.channel.post(self._topic, [key, for_all, entry], to=0)

    def take(self, key: Key, *, whole: bool = True) -> Mapping[int, Any]:
        """On rank 0: return what was posted under a key, once: when all entries have come, or those there are."""
        with self.channel.news:
            if not whole and key in self._coming:
                return self._coming.pop(key)
            return self._complete.pop(key, {})

    def collect(self, key: Key, entry: Any, *, for_all: bool = True) -> Gathered:
        """Post this rank's entry, wait for the others' and return them all. Ranks: every rank, in any order."""
        # If the entries are for rank 0 alone, the other ranks return their own entry at once.
        own = self.channel.rank
        self.post(key, entry, for_all=for_all)
        if own and not for_all:
            return Gathered({own: entry})
        patience = self.timeout + (_RESULT_DELAY if own else 0.0)
        with self.waiting(key):
            self.channel.wait_for(lambda: key in self._complete, patience)
        with self.channel.news:
            if key not in self._complete:
                self._overdue.add(key)
                if own == 0:
                    self._coming.setdefault(key, {})[own] = entry
                    self._finish(key, for_all=for_all)
            came = self._complete.pop(key, None)
        if came is None:
            return Gathered({own: entry}, (0,), self.timeout)
        missing = tuple(rank for rank in range(self.channel.world_size) if rank not in came)
        return Gathered(dict(sorted({**came, own: entry}.items())), missing, self.timeout)

    @contextmanager
    def waiting(self, key: Key) -> Iterator[None]:
        """Let the guard see that this rank waits in the body for the others to reach the same point."""
        self.last.append(this := Collecting(key, time.time()))
        try:
            yield
        finally:
            this.waits = False

    @property
    def is_awaited(self) -> bool:
        """On rank 0: whether entries of some ranks have come and those of others have not."""
        return bool(self._coming)

    def close(self) -> None:
        for remove in self._remove:
            remove()

    def _take_entry(self, message: Message) -> None:
        """On rank 0: keep an entry; the last one completes a collection."""
        key, for_all, entry = message.body
        with self.channel.news:
            if key in self._overdue:
                return
            entries = self._coming.setdefault(key, {})
            entries[message.sender] = entry
            if len(entries) == self.channel.world_size:
                self._finish(key, for_all=for_all)
        self.on_entry()

    def _finish(self, key: Key, *, for_all: bool) -> None:
        """On rank 0: end a collection with the entries that have come."""
        self._complete[key] = entries = self._coming.pop(key)
        if for_all:
            self.channel.post(f"{self._topic}/result", [key, list(entries), list(entries.values())])

    def _take_result(self, message: Message) -> None:
        key, ranks, entries = message.body
        with self.channel.news:
            if key not in self._overdue:
                self._complete[key] = dict(zip(ranks, entries, strict=True))
