"""How far this rank's clock is from rank 0's, found by messages there and back."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from lightning_lockstep.distributed.side_channel.base import Message, SideChannel

__all__ = ["ClockOffset"]

# Clocks drift apart by some 0.01 % at worst, so that the answers of the last two rounds or so are good enough.
_KEPT = 16

_PING, _PONG = "clock/ping", "clock/pong"


class _Answer(NamedTuple):
    round_trip: float
    offset: float


class ClockOffset:
    """Estimates what to add to this rank's wall clock to get that of rank 0.

    The answer that was fastest there and back counts. Its error is at most half of that round trip, so a difference
    below that is taken for none: on one host the clocks are the same.
    """

    def __init__(self, channel: SideChannel) -> None:
        self._channel = channel
        self._answers: deque[_Answer] = deque(maxlen=_KEPT)
        self._to_send = 0
        is_main = channel.rank == 0
        self._remove = channel.on(_PING, self._answer) if is_main else channel.on(_PONG, self._take)

    @property
    def error(self) -> float:
        """Return by how much the estimate may be wrong [s]; on rank 0, whose clock it is, by nothing."""
        return self._best().round_trip / 2

    @property
    def seconds(self) -> float:
        """Return what to add to this rank's ``time.time()`` [s]; 0 while nothing is known."""
        best = self._best()
        return best.offset if abs(best.offset) > best.round_trip / 2 else 0.0

    def measure(self, pings: int = 4) -> None:
        """Ask rank 0 for its time, one question after the other, and return at once."""
        if self._channel.rank != 0:
            idle, self._to_send = self._to_send <= 0, pings
            if idle:
                self._ask()

    def close(self) -> None:
        """Stop listening."""
        self._remove()

    def _best(self) -> _Answer:
        # A copy: answers arrive on another thread.
        return min(self._answers.copy(), default=_Answer(0.0, 0.0))

    def _ask(self) -> None:
        # The time is taken where the message is made, so that it does not count what was queued before it.
        self._channel.post(_PING, to=0, make=lambda _: time.time())

    def _answer(self, message: Message) -> None:
        self._channel.post(_PONG, message.body, to=message.sender, make=lambda sent: [sent, time.time()])

    def _take(self, message: Message) -> None:
        now = time.time()
        sent, theirs = message.body
        self._answers.append(_Answer(now - sent, theirs - (sent + now) / 2))
        self._to_send -= 1
        if self._to_send > 0:
            self._ask()
