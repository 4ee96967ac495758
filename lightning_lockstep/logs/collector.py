"""The collector on rank 0, which prints the lines of all ranks in rank order, and a merger on other nodes.

A line is posted over the side channel and the call returns. On rank 0 it waits for those of other ranks. The
first rank of every other node merges the lines of that node, where the ranks have agreed to that.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterable

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed import SideChannel
from lightning_lockstep.distributed.failure.process_exit import on_flush, printed_a_line
from lightning_lockstep.logs.lines import Line, record_of
from lightning_lockstep.logs.ordering import Batch, LineOrdering, same_text
from lightning_lockstep.logs.ordering_thread import OrderingThread

__all__ = ["LEVEL", "LINES", "NODE", "ONCE", "Collector", "NodeMerger"]

LINES, LEVEL, ONCE, NODE = "log/lines", "log/level", "log/once", "log/node"
# Longest time for which a node's first rank keeps lines back to merge them [s].
_MERGE_FOR = 0.02
# How long a line of which one is enough waits for the equal ones of other ranks [s].
_ONCE_FOR = 0.3


class Collector:
    """Prints the lines of all ranks in rank order; lives on rank 0."""

    def __init__(
        self,
        channel: SideChannel,
        *,
        timeout: float = 5.0,  # longest time that a line waits for those of other ranks [s]
        merging: bool = True,  # whether equal lines become one
        emit: Callable[[logging.LogRecord], None] | None = None,
    ) -> None:
        self._emit = emit or (lambda record: logging.getLogger(record.name).handle(record))
        ranks = range(channel.world_size)
        ordering = LineOrdering(ranks, timeout=timeout, merging=merging)
        self.lines = OrderingThread(ordering, self._print, name="lockstep-log-order", look_every=0.25)
        once = LineOrdering(ranks, timeout=_ONCE_FOR, key=same_text)
        self._once = OrderingThread(once, self._print_once, name="lockstep-log-once", look_every=0.1)
        self._remove = [
            channel.on(LINES, lambda message: self.lines.receive(message.body)),
            channel.on(LEVEL, lambda message: self.note_level(message.sender, *message.body)),
            channel.on(ONCE, lambda message: self.add_once(Line.unpack(message.body))),
            on_flush(self.flush),
        ]
        channel.at_close(self.close)

    def configure(self, *, timeout: float, merging: bool) -> None:
        """Change the time that lines wait [s] and whether equal ones are merged."""

        def change() -> list[Batch]:
            self.lines.ordering.timeout, self.lines.ordering.merging = timeout, merging
            return []

        self.lines.do(change)

    def note_level(self, rank: int, logger: str, level: int) -> None:
        """Note that a rank logs nothing below ``level`` in a logger; returns at once."""
        self.lines.do(lambda: self.lines.ordering.note_level(rank, logger, level))

    def add_once(self, line: Line, *, printed: bool = False) -> None:
        """Take a line of which one is enough for all ranks; returns at once.

        The first one waits a moment for the equal lines of other ranks and is printed with their numbers; what
        comes later is not printed. ``printed``: rank 0 has printed the line already.
        """
        now = time.monotonic()

        def add() -> list[Batch]:
            batches = self._once.ordering.add(line, now, waits=not printed)
            return [] if printed else batches

        self._once.do(add)

    def settle(self, timeout: float) -> None:
        """Wait up to ``timeout`` [s] for lines that are under way, then print all that is held back."""
        deadline = time.monotonic() + timeout
        while self.lines.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        self.flush()

    def flush(self) -> None:
        """Print all that is held back."""
        self.lines.flush()
        self._once.flush()

    def close(self) -> None:
        """Print all that is held back and stop."""
        self.flush()
        for remove in self._remove:
            remove()
        self.lines.stop()
        self._once.stop()

    def _print(self, batch: Batch) -> None:
        for line in batch.lines:
            self._print_record(record_of(line, prefix=_late_prefix(line) if batch.late else None))
        if batch.missing:
            self._print_record(_missing_note(batch))

    def _print_once(self, batch: Batch) -> None:
        for line in batch.lines if not batch.late else ():
            self._print_record(record_of(line))

    def _print_record(self, record: logging.LogRecord) -> None:
        printed_a_line()
        try:
            self._emit(record)
        except Exception:
            # A faulty handler must neither end the thread that prints nor keep the lines after this one.
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc(file=sys.stderr)


class NodeMerger:
    """Merges the lines of one node before they go to rank 0; lives on the node's first rank."""

    def __init__(self, channel: SideChannel, ranks: Iterable[int], *, merge_for: float = _MERGE_FOR) -> None:
        self._channel = channel
        ordering = LineOrdering(ranks, timeout=merge_for)
        self.lines = OrderingThread(ordering, self._pass_on, name="lockstep-log-node", look_every=merge_for)
        channel.on(NODE, lambda message: self.lines.receive(message.body))
        on_flush(self.flush)

    def flush(self) -> None:
        """Pass on all that is held back."""
        self.lines.flush()
        self._channel.flush(1.0)

    def _pass_on(self, batch: Batch) -> None:
        self._channel.post(LINES, batch.lines, to=0)


def _late_prefix(line: Line) -> str:
    return f"[{ranks_in_words(line.ranks)}, late] "


def _missing_note(batch: Batch) -> logging.LogRecord:
    first = batch.lines[0]
    text = f"{ranks_in_words(batch.missing)} did not log this line within {batch.waited:.1f} s"
    hosts = ("",) * len(batch.missing)
    return record_of(Line(first.site, batch.missing, hosts, text, time.time(), first.function), prefix="")
