"""Lines on their way: sent by each rank, collected and printed by rank 0."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lightning_lockstep._text import ranks_in_words, say
from lightning_lockstep.distributed import SideChannel
from lightning_lockstep.distributed.failure.process_exit import at_exit, on_flush, outcome
from lightning_lockstep.distributed.process_group import current_group
from lightning_lockstep.distributed.side_channel.opening import known_rank, side_channel_if_open
from lightning_lockstep.logs.ordering import (
    Batch,
    Line,
    LineOrdering,
    LogCall,
    OrderingThread,
    line_of,
    record_of,
)

# -- The collector on rank 0, which prints the lines of all ranks in rank order
# A line is posted over the side channel and the call returns. On rank 0 it waits for those of other ranks.

LINE, LEVEL, ONCE = "log/line", "log/level", "log/once"
STDERR = "standard error"  # in the place of a logger's name: no level and no handler may drop the line
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
        self._emit = emit or _handle
        ranks = range(channel.world_size)
        ordering = LineOrdering(ranks, timeout=timeout, merging=merging)
        self._once = LineOrdering(ranks, timeout=_ONCE_FOR, once=True)
        self.lines = OrderingThread(self._print, ordering, self._once)
        self._remove = [
            channel.on(LINE, lambda message: self.lines.receive(message.body)),
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
        """Take a line of which one is enough for all ranks; returns at once."""
        # The first one waits a moment for the equal lines of other ranks and is printed with their numbers;
        # what comes later is not printed. ``printed``: rank 0 has printed the line already.
        now = time.monotonic()

        def add() -> list[Batch]:
            batches = self._once.add(line, now, waits=not printed)
            return [] if printed else batches

        self.lines.do(add)

    def settle(self, timeout: float) -> None:
        """Wait up to ``timeout`` [s] for lines that are under way, then print all that is held back."""
        deadline = time.monotonic() + timeout
        while self.lines.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        self.flush()

    def flush(self) -> None:
        """Print all that is held back."""
        self.lines.flush()

    def close(self) -> None:
        """Print all that is held back and stop."""
        self.flush()
        for remove in self._remove:
            remove()
        self.lines.stop()

    def _print(self, batch: Batch) -> None:
        for line in batch.lines:
            prefix = f"[{ranks_in_words(line.ranks)}, late] " if batch.late else None
            self._print_record(record_of(line, prefix=prefix))
        if batch.missing:
            self._print_record(_missing_note(batch))

    def _print_record(self, record: logging.LogRecord) -> None:
        outcome.printed_a_line()
        try:
            self._emit(record)
        except Exception:
            # A faulty handler must neither end the thread that prints nor keep the lines after this one.
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc(file=sys.stderr)


def _missing_note(batch: Batch) -> logging.LogRecord:
    first = batch.lines[0]
    text = f"{ranks_in_words(batch.missing)} did not log this line within {batch.waited:.1f} s"
    hosts = ("",) * len(batch.missing)
    return record_of(Line(first.site, batch.missing, hosts, text, time.time(), first.function), prefix="")


# -- From a logger to the collector on rank 0, also for lines that are logged before the ranks are connected

# How long a rank keeps a line to print it itself if rank 0 fails: the longest time for which rank 0 holds a
# line back by default, and a margin [s].
_KEPT_FOR = 7.0


class LineSender:
    """Sends this rank's lines to rank 0, and keeps the youngest in case rank 0 fails."""

    def __init__(self, channel: SideChannel, collector: Collector | None) -> None:
        self.channel, self.collector = channel, collector
        self.process = os.getpid()
        self._host = socket.gethostname()
        self._kept: deque[LogCall] = deque(maxlen=10_000)
        self._sent_levels: dict[str, int] = {}
        # Touched by one thread at a time: the one that makes lines, in the order of the calls.
        self._repeats: dict[tuple[str, int, str, int], int] = {}
        self._post = channel.poster(LINE, to=0, make=self._line)
        if collector is None:
            on_flush(self.flush)
            channel.at_close(self.flush)

    def send(self, call: LogCall) -> None:
        """Send a line in order; returns at once, and leaves all that can wait to other threads."""
        if self._sent_levels and call[0][1] < self._sent_levels.get(call[0][0], 0):
            del self._sent_levels[call[0][0]]
        if self.collector is not None:
            self.collector.lines.add(lambda: self._line(call))
            return
        self._kept.append(call)
        self._post(call)

    def send_once(self, call: LogCall, *, repeat: int = 0, printed: bool = False) -> None:
        """Send a line of which one is enough for all ranks, ``printed`` by rank 0 or not; returns at once."""
        line = line_of(call, rank=self.channel.rank, host=self._host, repeat=repeat)
        if self.collector is not None:
            self.collector.add_once(line, printed=printed)
        else:
            self._kept.append(call)
            self.channel.post(ONCE, line, to=0)

    def send_level(self, logger: str, level: int) -> None:
        """Let rank 0 know, once, that this rank logs nothing below ``level`` in a logger; returns at once."""
        if self._sent_levels.get(logger) == level:
            return
        self._sent_levels[logger] = level
        if self.collector is not None:
            self.collector.note_level(self.channel.rank, logger, level)
        else:
            self.channel.post(LEVEL, [logger, level], to=0)

    def flush(self) -> None:
        """Send what is queued; when rank 0 has failed, print here what it may not have printed."""
        if self.channel.usable:
            self.channel.flush(1.0)
        if not self.channel.lost:
            return
        oldest, why = time.time() - _KEPT_FOR, "printed here since rank 0 has failed"
        while self._kept:
            line = line_of(self._kept.popleft(), rank=self.channel.rank, host=self._host, repeat=0)
            # A library's warning most likely stands above, from another rank, and would be in the way below an error.
            if line.created >= oldest and line.site.logger != STDERR:
                _handle(record_of(line, prefix=f"[rank {self.channel.rank}, {why}] "))

    def _line(self, call: LogCall) -> Line:
        repeat = self._repeats.get(call[0], 0)
        self._repeats[call[0]] = repeat + 1
        return line_of(call, rank=self.channel.rank, host=self._host, repeat=repeat)


class _LocalPrinter:
    """Stands in for the sender of a run whose rank 0 never opened the channel."""

    def send(self, call: LogCall) -> None:
        rank = (known_rank() or (0, 1))[0]
        _handle(record_of(line_of(call, rank=rank, host=socket.gethostname(), repeat=0)))

    def send_once(self, call: LogCall, *, printed: bool = False) -> None:
        if not printed:
            self.send(call)

    def send_level(self, logger: str, level: int) -> None:
        """There is nobody to send it to."""


Work = Callable[["LineSender | _LocalPrinter"], None]


def sender_on(channel: SideChannel) -> LineSender:
    """Return the sender of a side channel, made on the first call; on rank 0 the collector is made, too."""
    return channel.get_or_create(_make_sender)


def _make_sender(channel: SideChannel) -> LineSender:
    return LineSender(channel, Collector(channel) if channel.rank == 0 else None)


def connected_sender() -> LineSender | None:
    """Return the sender of the process group that exists now, as fast as can be."""
    global _cached
    group = current_group()
    if group is None:
        return None
    if _cached is not None and _cached[0] is group:
        sender = _cached[1]
        if sender.channel.usable and sender.process == os.getpid():
            return sender
    found = _find_sender()
    _cached = None if found is None else (group, found)
    return found


def with_sender(work: Work, *, open_if_easy: bool = True) -> bool:
    """Call ``work`` with the sender now, or once rank 0 has opened the channel; return whether that can happen."""
    global _waiter
    sender = _find_sender(open_if_easy=open_if_easy)
    if sender is not None:
        work(sender)
        return True
    known = known_rank()
    if known is None or known[1] == 1 or side_channel_if_open() is not None:
        return False
    _kept_back.append(work)
    if known[0] != 0 and (_waiter is None or not _waiter.is_alive()):
        _waiter = threading.Thread(target=_look_for_channel, name="lockstep-log-open", daemon=True)
        with suppress(RuntimeError):  # Python is exiting, and prints what is kept back at the end
            _waiter.start()
    if side_channel_if_open() is not None:
        _find_sender()  # opened while this line was put aside, and perhaps nobody looks again
    return True


def send_level(logger: logging.Logger) -> None:
    """Let rank 0 know, if ranks are connected, that this one logs nothing below the level of ``logger``."""
    known = known_rank()
    if known is not None and known[1] > 1:
        level = logger.getEffectiveLevel()
        with_sender(lambda sender: sender.send_level(logger.name, level), open_if_easy=False)


def _find_sender(*, open_if_easy: bool = True) -> LineSender | None:
    """Return what takes this rank's lines, or ``None`` while the ranks are not connected."""
    known = known_rank()
    if known is None:
        return None
    # Rank 0 can open the channel by itself; another rank would have to ask the store first.
    channel = side_channel_if_open(open_if_easy=open_if_easy and known[0] == 0)
    if channel is None or not channel.usable:
        return None
    sender = sender_on(channel)
    if sender.process != os.getpid():
        return None  # a forked worker has the object but not its threads
    _release_kept_back(sender)
    return sender


def _look_for_channel() -> None:
    while known_rank() is not None and side_channel_if_open(open_if_easy=True) is None:
        time.sleep(0.05)
    _find_sender()


def _release_kept_back(sender: LineSender | _LocalPrinter) -> None:
    if not _kept_back:
        return
    # In their order, and before whatever this thread logs next, whichever thread has come first.
    with _releasing:
        while _kept_back:
            _kept_back.popleft()(sender)


def _print_kept_back() -> None:
    if known_rank() is not None and side_channel_if_open() is not None:
        _find_sender()
    _release_kept_back(_LocalPrinter())


def _handle(record: logging.LogRecord) -> None:
    if record.name == STDERR:
        say(record.getMessage())
    else:
        logging.getLogger(record.name).handle(record)


# Lines logged while rank 0 had not opened the channel yet; they are sent with the first one after that.
_kept_back: deque[Work] = deque(maxlen=10_000)
_releasing = threading.RLock()
_waiter: threading.Thread | None = None
_cached: tuple[object, LineSender] | None = None
on_flush(_print_kept_back)
at_exit(_print_kept_back)
