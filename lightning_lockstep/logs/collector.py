"""Gathers the lines of all ranks on rank 0 and prints them in rank order.

A line is posted over the side channel and the call returns. On rank 0 one thread owns the order book; on the
first rank of every other node one thread merges the lines of that node, where the ranks have agreed to that.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning_lockstep.distributed import SideChannel
from lightning_lockstep.distributed.failure.flushing import on_flush
from lightning_lockstep.logs.lines import Line, Said, line_of, rank_list, record_of
from lightning_lockstep.logs.ordering import Batch, LineOrdering, OnceBook
from lightning_lockstep.logs.ordering_thread import OrderingThread

__all__ = ["Collector", "LineSender", "NodeMerger"]

LINES, LEVEL, ONCE, NODE = "log/lines", "log/level", "log/once", "log/node"
# Longest time for which a node's first rank keeps lines back to merge them [s].
_MERGE_FOR = 0.02
# Lines this old have surely been printed by rank 0; younger ones are said here when rank 0 is gone [s].
_MARGIN = 2.0


class Collector:
    """Prints the lines of all ranks in rank order; lives on rank 0.

    Args:
        channel: The side channel of the run.
        timeout: Longest time that a line waits for those of other ranks [s].
        folding: Whether equal lines become one.
        emit: Prints a record; by default the handlers of the logger of the record's name do.
    """

    def __init__(
        self,
        channel: SideChannel,
        *,
        timeout: float = 5.0,
        folding: bool = True,
        emit: Callable[[logging.LogRecord], None] | None = None,
    ) -> None:
        self._emit = emit or (lambda record: logging.getLogger(record.name).handle(record))
        self._book = LineOrdering(range(channel.world_size), timeout=timeout, folding=folding)
        self._supervisor = OrderingThread(self._book, self._print, name="lockstep-log-order", look_every=0.25)
        self._once = OnceBook()
        self._once_keeper = OrderingThread(self._once, self._print, name="lockstep-log-once", look_every=0.1)
        self._remove = [
            channel.on(LINES, lambda message: self.add(message.body)),
            channel.on(LEVEL, lambda message: self.hear_level(message.sender, *message.body)),
            channel.on(ONCE, lambda message: self.add_once(Line.unpack(message.body))),
            on_flush(self.flush),
        ]
        channel.at_close(self.close)

    def configure(self, *, timeout: float, folding: bool) -> None:
        """Change the time that lines wait [s] and whether equal ones are folded."""

        def change() -> list[Batch]:
            self._book.timeout, self._book.folding = timeout, folding
            return []

        self._supervisor.do(change, print_here=True)

    def add(self, packed: Sequence[Sequence[Any]]) -> None:
        """Take lines of other ranks and print what is ready, here.

        Args:
            packed: The lines, packed.
        """
        now = time.monotonic()
        self._supervisor.do(
            lambda: [batch for p in packed for batch in self._book.add(Line.unpack(p), now)], print_here=True
        )

    def add_own(self, said: Said, make: Callable[[Said], Line]) -> None:
        """Take what rank 0 says; returns at once.

        Args:
            said: What it says.
            make: Makes the line of it, on another thread, in the order of the calls.
        """
        now = time.monotonic()
        self._supervisor.do(lambda: self._book.add(make(said), now), print_here=False, can_wait=True)

    def hear_level(self, rank: int, logger: str, level: int) -> None:
        """Note that a rank says nothing below ``level`` in a logger; returns at once."""
        self._supervisor.do(lambda: self._book.hear_level(rank, logger, level), print_here=False)

    def add_once(self, line: Line, *, printed: bool = False) -> None:
        """Take a line of which one is enough for all ranks; returns at once.

        Args:
            line: The line.
            printed: Whether it stands on the console already.
        """
        now = time.monotonic()
        self._once_keeper.do(lambda: self._once.add(line, now, printed=printed), print_here=False)

    def settle(self, timeout: float) -> None:
        """Give lines that are under way a moment to come, then print all that is held back.

        Args:
            timeout: Longest wait [s].
        """
        deadline = time.monotonic() + timeout
        while self._supervisor.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        self.flush()

    def flush(self) -> None:
        """Print all that is held back."""
        self._supervisor.flush()
        self._once_keeper.flush()

    def close(self) -> None:
        """Print all that is held back and stop."""
        self.flush()
        for remove in self._remove:
            remove()
        self._supervisor.stop()
        self._once_keeper.stop()

    def _print(self, batches: list[Batch]) -> None:
        for batch in batches:
            for line in batch.lines:
                self._say(record_of(line, prefix=_late_prefix(line) if batch.late else None))
            if batch.missing:
                self._say(_who_is_missing(batch))

    def _say(self, record: logging.LogRecord) -> None:
        try:
            self._emit(record)
        except Exception:
            # A faulty handler must neither end the thread that prints nor keep the lines after this one.
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc(file=sys.stderr)


class NodeMerger:
    """Merges the lines of one node before they go to rank 0; lives on the node's first rank.

    Args:
        channel: The side channel of the run.
        ranks: The ranks of this node.
        merge_for: Longest time for which lines are kept back [s].
    """

    def __init__(self, channel: SideChannel, ranks: Iterable[int], *, merge_for: float = _MERGE_FOR) -> None:
        self._channel = channel
        self._book = LineOrdering(ranks, timeout=merge_for, folding=True)
        self._supervisor = OrderingThread(
            self._book, self._pass_on, name="lockstep-log-node", look_every=merge_for
        )
        self._remove = [
            channel.on(NODE, lambda message: self.add(message.body)),
            on_flush(self.flush),
        ]

    def add(self, packed: Sequence[Sequence[Any]]) -> None:
        """Take lines of this node; returns at once."""
        now = time.monotonic()
        self._supervisor.do(
            lambda: [batch for p in packed for batch in self._book.add(Line.unpack(p), now)], print_here=True
        )

    def add_own(self, said: Said, make: Callable[[Said], Line]) -> None:
        """Take what this rank says; see :meth:`Collector.add_own`."""
        now = time.monotonic()
        self._supervisor.do(lambda: self._book.add(make(said), now), print_here=False, can_wait=True)

    def flush(self) -> None:
        """Pass on all that is held back."""
        self._supervisor.flush()
        self._channel.flush(1.0)

    def close(self) -> None:
        """Pass on all that is held back and stop."""
        self.flush()
        for remove in self._remove:
            remove()
        self._supervisor.stop()

    def _pass_on(self, batches: list[Batch]) -> None:
        lines = [line for batch in batches for line in batch.lines]
        if lines:
            self._channel.post(LINES, lines, to=0)


class LineSender:
    """Sends this rank's lines to rank 0, and keeps the youngest in case rank 0 is gone.

    Args:
        channel: The side channel of the run.
        collector: The collector, on rank 0.
        keep_for: How long a line is kept [s].
    """

    def __init__(self, channel: SideChannel, collector: Collector | None, *, keep_for: float = 5.0) -> None:
        self.channel, self.collector = channel, collector
        self.merger: NodeMerger | None = None
        self.node_leader: int | None = None
        self.process = os.getpid()
        self._host = socket.gethostname()
        self._keep_for = keep_for + _MARGIN
        self._kept: deque[Said] = deque(maxlen=10_000)
        self._told: dict[str, int] = {}
        # Touched by one thread at a time: the one that makes lines, in the order of the calls.
        self._turns: dict[tuple[str, int, str, int], int] = {}
        self._post = channel.poster(LINES, to=0, make=self._lines)
        if collector is None:
            on_flush(self.flush)
            channel.at_close(self.flush)

    def send(self, said: Said) -> None:
        """Send what this rank says; returns at once, and leaves all that can wait to other threads."""
        if self._told and said[0][1] < self._told.get(said[0][0], 0):
            del self._told[said[0][0]]
        if self.collector is not None:
            self.collector.add_own(said, self._line)
            return
        self._kept.append(said)
        if self.merger is not None:
            self.merger.add_own(said, self._line)
        elif self.node_leader is not None:
            self.channel.post(NODE, said, to=self.node_leader, make=self._lines)
        else:
            self._post(said)

    def _turn(self, said: Said) -> int:
        turn = self._turns.get(said[0], 0)
        self._turns[said[0]] = turn + 1
        return turn

    def _line(self, said: Said) -> Line:
        return line_of(said, rank=self.channel.rank, host=self._host, turn=self._turn(said))

    def _lines(self, said: Said) -> tuple[Line]:
        return (self._line(said),)

    def send_once(self, said: Said, *, turn: int = 0, printed: bool = False) -> None:
        """Send a line of which one is enough for all ranks; returns at once.

        Args:
            said: What this rank says.
            turn: How often it has said the same before.
            printed: Whether the line stands on this rank's console already.
        """
        line = line_of(said, rank=self.channel.rank, host=self._host, turn=turn)
        if self.collector is not None:
            self.collector.add_once(line, printed=printed)
        else:
            self._kept.append(said)
            self.channel.post(ONCE, line, to=0)

    def tell_level(self, logger: str, level: int) -> None:
        """Tell rank 0, once, that this rank says nothing below ``level`` in a logger; returns at once."""
        if self._told.get(logger) == level:
            return
        self._told[logger] = level
        if self.collector is not None:
            self.collector.hear_level(self.channel.rank, logger, level)
        else:
            self.channel.post(LEVEL, [logger, level], to=0)

    def flush(self) -> None:
        """Hand over what is under way; when rank 0 is gone, say here what it may not have printed."""
        if self.channel.usable:
            self.channel.flush(1.0)
        if not self.channel.lost:
            return
        oldest = time.time() - self._keep_for
        while self._kept:
            line = line_of(self._kept.popleft(), rank=self.channel.rank, host=self._host, turn=0)
            if line.created >= oldest:
                logging.getLogger(line.place.logger).handle(record_of(line, prefix=_orphan_prefix(line)))


def _late_prefix(line: Line) -> str:
    return f"[{rank_list(line.ranks)}, late] "


def _orphan_prefix(line: Line) -> str:
    return f"[rank {line.ranks[0]}, said here since rank 0 is gone] "


def _who_is_missing(batch: Batch) -> logging.LogRecord:
    place = batch.lines[0].place
    said = f"nothing came from {rank_list(batch.missing)} within {batch.waited:.1f} s of this"
    note = Line(place, batch.missing, ("",) * len(batch.missing), said, time.time(), batch.lines[0].function)
    return record_of(note, prefix="")


def sender_on(channel: SideChannel) -> LineSender:
    """Return the sender of a side channel, made on the first call; rank 0's prints, too.

    Ranks: any rank, alone; nothing is sent.
    """
    with _lock:
        if channel not in _senders:
            collector = Collector(channel) if channel.rank == 0 else None
            _senders[channel] = LineSender(channel, collector)
        return _senders[channel]


_senders: weakref.WeakKeyDictionary[SideChannel, LineSender] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
