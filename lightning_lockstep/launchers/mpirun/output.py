"""Passes on what mpirun prints: each line with its rank, without mpirun's remarks about a forced end."""

from __future__ import annotations

import re
import threading
from typing import IO, TextIO

__all__ = ["OutputRelay"]

_TAGGED = re.compile(r"^\[(?:\d+,)?(\d+)\](?:<\w+>:)? ?(.*)$", re.DOTALL)

# What mpirun prints when the ssh that holds a daemon ends: at start a daemon that did not come up, later one lost.
_DAEMON_ENDED = "daemon failed to report back after being spawned"
_DAEMON_LOST = "lost communication with a remote daemon"

# How often more mpirun would have printed what it has printed once.
_COUNT = re.compile(r"\s*\d+ more process(es have| has) sent help message")

# The report of the rank that failed first comes last; what mpirun has to add is less precise.
_REMARKS = re.compile(
    r"MPI_ABORT was invoked|Proc: \[\[|Errorcode:|NOTE: invoking MPI_ABORT|You may or may not see|exactly when"
    r"|prterun (has exited|detected)|job to be terminated|The first process to do so|Process name:|Exit code:"
    r'|"abort"\. This may|terminated by signals sent'
)


class OutputRelay:
    """Relays the streams of one mpirun, each in a thread of its own.

    Args:
        streams: Pairs of a stream of mpirun and where its lines go.
    """

    def __init__(self, *streams: tuple[IO[bytes], TextIO]) -> None:
        self._ranks_began, self._host_lost = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._relay, args=pair, daemon=True) for pair in streams]
        for thread in self._threads:
            thread.start()

    @property
    def host_lost(self) -> bool:
        """Whether mpirun has lost the connection to a host."""
        return self._host_lost.is_set()

    def finish(self) -> None:
        """Wait until everything has been passed on, 5 s per stream at most."""
        for thread in self._threads:
            thread.join(5.0)

    def _relay(self, source: IO[bytes], target: TextIO) -> None:
        blocks: dict[str, list[str]] = {}  # by rank: lines since a line of dashes
        for line in source:
            printed = line.decode(errors="replace").replace("\0", "")
            tagged = _TAGGED.match(printed)
            mark, text = (f"[rank {tagged[1]}] ", tagged[2]) if tagged else ("", printed)
            if tagged:
                self._ranks_began.set()
            elif _COUNT.match(text):
                continue
            elif _DAEMON_LOST in text or (self._ranks_began.is_set() and _DAEMON_ENDED in text):
                self._host_lost.set()
            if len(text) > 40 and not text.strip("-\n"):
                block = blocks.pop(mark, None)
                if block is None:
                    blocks[mark] = []
                elif not any(_REMARKS.search(one) for one in block):
                    target.write("".join(mark + one for one in block))
            elif mark in blocks:
                blocks[mark].append(text)
            elif text.strip():
                target.write(mark + text)
            target.flush()
        for mark, block in blocks.items():  # the last dashes never came
            target.write("".join(mark + one for one in block))
