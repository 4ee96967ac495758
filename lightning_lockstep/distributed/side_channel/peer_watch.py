"""Finds out what has become of a peer whose connection ended.

ZeroMQ's own thread exchanges heartbeats, whatever Python does: a rank that holds the GIL for minutes, or stands in
``pdb``, keeps answering. When a connection ends nevertheless, asking the peer's port tells three things apart:

=============== ===============================================================================================
refused         nobody listens there any more: the process has ended
accepted        the process is there and does not run: stopped (SIGSTOP, a debugger) or swapped out
no answer       its host, or the network between, is gone
=============== ===============================================================================================

The first is a loss at once. The others may pass, and count only after ``silence_limit``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["PeerWatch"]

# How often a peer that does not answer is asked, and how long one question takes at most [s]; a peer that is there, or
# whose host is gone, is asked less often once that has lasted.
_ASK_EVERY, _ASK_FOR, _ASK_AGAIN = 0.1, 0.3, 1.0
# So often in a row a connection is refused before that counts: a full queue of the listener refuses, too.
_REFUSALS = 2


@dataclass
class _Suspect:
    since: float
    ask_at: float = 0.0
    refused: int = 0
    reported: bool = False


class PeerWatch:
    """Watches the peers that a rank is connected to; all its methods belong to one thread."""

    def __init__(
        self,
        silence_limit: Callable[[], float],  # how long a peer may be frozen or unreachable [s]
        *,
        on_gone: Callable[[int, str], None],  # rank, reason; once: it has ended without closing its channel
        on_silent: Callable[[int, float, str], None],  # rank, seconds, reason; once: for longer than that
    ) -> None:
        self._silence_limit = silence_limit
        self._on_gone, self._on_silent = on_gone, on_silent
        self._addresses: dict[int, tuple[str, int]] = {}
        self._suspects: dict[int, _Suspect] = {}
        self._closed: set[int] = set()
        self._connected: set[int] = set()

    def add(self, rank: int, host: str, port: int) -> None:
        """Watch the connection to a peer that listens there."""
        self._addresses[rank] = (host, port)

    def connected(self, rank: int) -> None:
        """Note that the peer has answered."""
        self._suspects.pop(rank, None)
        self._connected.add(rank)

    def answers(self, rank: int) -> bool:
        """Return whether a peer answers heartbeats; one that is stopped does until their timeout. From any thread."""
        return rank in self._connected

    def disconnected(self, rank: int) -> None:
        self._connected.discard(rank)
        if rank not in self._closed:
            self._suspects.setdefault(rank, _Suspect(time.monotonic()))

    def closed(self, rank: int) -> None:
        """Note that the peer has closed its channel: what it does from now on is its own affair."""
        self._closed.add(rank)
        self._connected.discard(rank)
        self._suspects.pop(rank, None)

    @property
    def next_look(self) -> float | None:
        """Longest time until :meth:`look` is to be called [s]; ``None`` while every peer answers."""
        return _ASK_EVERY if self._suspects else None

    def look(self) -> None:
        """Ask the peers that do not answer."""
        now = time.monotonic()
        for rank, suspect in list(self._suspects.items()):
            if now >= suspect.ask_at:
                suspect.ask_at = now + _ASK_EVERY
                self._ask(rank, suspect)

    def _ask(self, rank: int, suspect: _Suspect) -> None:
        host, port = self._addresses[rank]
        try:
            socket.create_connection((host, port), timeout=_ASK_FOR).close()
        except ConnectionRefusedError:
            suspect.refused += 1
            if suspect.refused >= _REFUSALS:
                self.closed(rank)
                self._on_gone(rank, f"nobody listens at {host} port {port} any more")
            return
        except OSError as error:
            state = f"its host does not answer ({error.strerror or error})"
        else:
            state = "its process is there and does not run: it was stopped, or its host has no memory left"
        suspect.refused, seconds = 0, time.monotonic() - suspect.since
        if seconds > _ASK_AGAIN:  # a process that is being killed still answers for a moment
            suspect.ask_at = time.monotonic() + _ASK_AGAIN
        if seconds > self._silence_limit() and not suspect.reported:
            suspect.reported = True
            self._on_silent(rank, seconds, state)
