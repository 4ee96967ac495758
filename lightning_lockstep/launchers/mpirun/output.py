"""Passes on what mpirun prints: each line with its rank, without mpirun's remarks about a forced end."""

from __future__ import annotations

import os
import re
import select
import threading
from collections.abc import Callable, Iterator
from typing import IO, TextIO

from lightning_lockstep.launchers.mpirun.sink import Sink

__all__ = ["OutputRelay"]

_TAGGED = re.compile(r"^\[(?:\d+,)?(\d+)\](?:<\w+>:)? ?(.*)$", re.DOTALL)

# What mpirun prints when the ssh that holds a daemon ends: at start a daemon that did not come up, later one lost.
_DAEMON_ENDED = "daemon failed to report back after being spawned"
_DAEMON_LOST = "lost communication with a remote daemon"

# How often more mpirun would have printed what it has printed once.
_COUNT = re.compile(r"\s*\d+ more process(es have| has) sent help message")

# Open MPI prints its remarks between two such lines, each remark at once.
_DASHES = "-" * 74
_AT_ONCE = 0.2  # [s]
# How those begin that are left out: the report of the rank that failed first comes last; what mpirun has to add is
# less precise. The first of them comes from the rank that ends the job.
_REMARKS = re.compile(
    r"MPI_ABORT was invoked|(prterun|mpirun) (has exited|detected that one or more processes)"
)

_NAMES = ("standard output", "standard error")


class OutputRelay:
    """Relays the streams of one mpirun, each in a thread of its own.

    It goes on reading when it can no longer write, so that the ranks go on too; that is said once, on the last of the
    streams.
    """

    # streams: each of mpirun's with where its lines go: standard output, standard error
    def __init__(self, *streams: tuple[IO[bytes], TextIO | None]) -> None:
        self._ranks_began, self._host_lost = threading.Event(), threading.Event()
        self._sinks = [
            Sink(target, name, self.say) for name, (_, target) in zip(_NAMES, streams, strict=True)
        ]
        self._threads = [
            threading.Thread(target=self._relay, args=(source, sink), daemon=True)
            for (source, _), sink in zip(streams, self._sinks, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def host_lost(self) -> bool:
        """Whether mpirun has lost the connection to a host."""
        return self._host_lost.is_set()

    def say(self, text: str) -> None:
        """Print something of our own to standard error."""
        self._sinks[-1].write(text)

    def expect_end(self) -> None:
        """Have the ranks wait no more for a stream that is full, since they have been told to end."""
        for sink in self._sinks:
            sink.expect_end()

    def finish(self) -> None:
        """Wait until everything has been passed on, as long as it is taken."""
        self.expect_end()
        for thread, sink in zip(self._threads, self._sinks, strict=True):
            while thread.is_alive() and not sink.is_stuck():
                thread.join(0.1)
            thread.join(1.0)  # it may still be saying so

    def _relay(self, source: IO[bytes], sink: Sink) -> None:
        remarks = _Remarks() if sink is self._sinks[-1] else None
        for line in _lines(source, lambda: remarks is not None and remarks.held is not None):
            if line is None:
                sink.write(remarks.release() if remarks else "")
                continue
            printed = line.decode(errors="replace").replace("\0", "")
            tagged = _TAGGED.match(printed)
            mark, text = (f"[rank {tagged[1]}] ", tagged[2]) if tagged else ("", printed)
            self._take_note(text, by_rank=tagged is not None)
            if not text.strip() or (not tagged and _COUNT.match(text)):
                continue
            sink.write(remarks.without(mark, text) if remarks else mark + text)

    def _take_note(self, text: str, *, by_rank: bool) -> None:
        if by_rank:
            self._ranks_began.set()
        elif _DAEMON_LOST in text or (self._ranks_began.is_set() and _DAEMON_ENDED in text):
            self._host_lost.set()


class _Remarks:
    """Leaves mpirun's remarks out; holds back one line at most, which may be the first of one."""

    def __init__(self) -> None:
        self.held: tuple[str, str] | None = None  # mark and text of that line
        self._inside: set[str] = set()  # marks of ranks, or of mpirun itself, in the midst of a remark

    def without(self, mark: str, text: str) -> str:
        """Return what may be printed now that this line has come."""
        is_dashes = text.rstrip("\n") == _DASHES
        if mark in self._inside:
            self._inside -= {mark} if is_dashes else set()
            return self.release()
        if self.held is not None and self.held[0] == mark and _REMARKS.match(text):
            self.held = None
            self._inside.add(mark)
            return ""
        before = self.release()
        if is_dashes:
            self.held = mark, text
            return before
        return before + mark + text

    def release(self) -> str:
        """Return the line that is held back, which begins no remark."""
        held, self.held = self.held, None
        return "" if held is None else held[0] + held[1]


def _lines(source: IO[bytes], is_holding: Callable[[], bool]) -> Iterator[bytes | None]:
    """Yield each line; ``None`` at the end, and when no more has come at once after a line that is held back."""
    rest = bytearray()
    while True:
        if is_holding() and not select.select([source], [], [], _AT_ONCE)[0]:
            yield None
        piece = os.read(source.fileno(), 1 << 16)
        *lines, tail = piece.split(b"\n")
        for line in lines:
            yield bytes(rest + line + b"\n")
            rest.clear()
        rest += tail
        if not piece:
            yield from (bytes(rest), None) if rest else (None,)
            return
