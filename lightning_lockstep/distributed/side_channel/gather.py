"""One entry of every rank, gathered over the side channel."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.side_channel.channel import Message, SideChannel
from lightning_lockstep.errors import CollectiveStallError

# -- One entry of every rank, collected without a collective --
# Each rank posts its entry to the rank that collects. When all have come, or when that rank has waited long
# enough, the collected entries are there: on every rank the same, or on the collecting rank alone. A rank may
# wait for them at once (:meth:`Gather.collect`), or post now and read later (:meth:`Gather.post` and
# :meth:`Gather.read`), when they have long arrived and nobody waits.

# How much longer than the collecting rank the others wait, so that its list of who is missing reaches them [s].
_RESULT_DELAY = 2.0

Key = int | str


@dataclass(frozen=True)
class Gathered:
    """What was collected: entries by rank, the ranks whose entry is missing, and how long was waited at most [s]."""

    # Only rank 0 is missing where it collects and did not answer: then nothing is known of the others.

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


class _Collection(NamedTuple):
    """What the collecting rank has of a key so far."""

    for_all: bool
    entries: dict[int, Any]


class Gather:
    """Collects one entry of every rank under a key, any number of times. Ranks: one object on every rank."""

    # `name` tells several gathers on one channel apart. A key costs one message of each rank to the one that collects,
    # and one back where all ranks get the entries.

    def __init__(self, channel: SideChannel, name: str, *, timeout: float = 60.0) -> None:
        self.channel, self.timeout = channel, timeout
        self._topic = f"gather/{name}"
        self._coming: dict[Key, _Collection] = {}
        self._complete: dict[Key, Gathered] = {}
        self._overdue: set[Key] = set()  # given up: what still comes is not kept
        self._news = threading.Condition()
        self._remove = [
            channel.on(self._topic, self._take_entry),
            channel.on(f"{self._topic}/result", self._take_result),
        ]

    def post(self, key: Key, entry: Any, *, to: int | None = None) -> None:
        """Send this rank's entry, for rank ``to`` alone or for all, and return at once. Ranks: every rank."""
        # A key names one collection, the same on every rank, and is never used again.
        collector = to or 0
        if collector == self.channel.rank:
            self._collect(key, collector, entry, for_all=to is None)
        else:
            self.channel.post(self._topic, [key, to is None, entry], to=collector)

    def read(self, key: Key) -> Gathered:
        """Return once what was collected under ``key``, after this rank's :meth:`post`; waits up to the timeout."""
        gathered = self._complete.pop(key, None)  # as a rule it came long ago: no lock is needed
        return gathered if gathered is not None else self._wait(key)

    def collect(self, key: Key, entry: Any, *, to: int | None = None) -> Gathered:
        """Post this rank's entry, wait for the others' and return them all. Ranks: every rank, in any order."""
        # A rank that does not get the entries of others has its own alone, and does not wait.
        self.post(key, entry, to=to)
        if to not in (None, self.channel.rank):
            return Gathered({self.channel.rank: entry})
        gathered = self.read(key)
        if self.channel.rank in gathered.entries:
            return gathered
        with_own = {**gathered.entries, self.channel.rank: entry}
        return Gathered(dict(sorted(with_own.items())), gathered.missing, gathered.timeout)

    def close(self) -> None:
        """Stop listening."""
        for remove in self._remove:
            remove()

    def _wait(self, key: Key) -> Gathered:
        with self._news:
            patience = self.timeout + (0.0 if key in self._coming else _RESULT_DELAY)
            if self.channel.wait_for(self._news, lambda: key in self._complete, patience):
                return self._complete.pop(key)
            self._overdue.add(key)
            collection = self._coming.pop(key, None)
            if collection is None:
                return Gathered({}, (0,), self.timeout)
        return self._finish(key, collection)

    def _collect(self, key: Key, rank: int, entry: Any, *, for_all: bool) -> None:
        with self._news:
            if key in self._overdue:
                return
            collection = self._coming.setdefault(key, _Collection(for_all, {}))
            collection.entries[rank] = entry
            if len(collection.entries) < self.channel.world_size:
                return
            del self._coming[key]
            self._complete[key] = self._finish(key, collection)
            self._news.notify_all()

    def _finish(self, key: Key, collection: _Collection) -> Gathered:
        entries = dict(sorted(collection.entries.items()))
        if collection.for_all and self.channel.world_size > 1:
            self.channel.post(f"{self._topic}/result", [key, list(entries), list(entries.values())])
        return self._gathered(entries)

    def _gathered(self, entries: Mapping[int, Any]) -> Gathered:
        if len(entries) == self.channel.world_size:  # as a rule; without a look at every rank
            return Gathered(entries, (), self.timeout)
        missing = tuple(rank for rank in range(self.channel.world_size) if rank not in entries)
        return Gathered(entries, missing, self.timeout)

    def _take_entry(self, message: Message) -> None:
        key, for_all, entry = message.body
        self._collect(key, message.sender, entry, for_all=for_all)

    def _take_result(self, message: Message) -> None:
        key, ranks, entries = message.body
        with self._news:
            if key not in self._overdue:
                self._complete[key] = self._gathered(dict(zip(ranks, entries, strict=True)))
                self._news.notify_all()
