"""Ranks that are gone, or silent, without having reported an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lightning_lockstep.distributed.failure.record import FailureRecord
from lightning_lockstep.distributed.side_channel.base import SideChannel

__all__ = ["BETTER_REPORT", "LostPeers"]

#: How long the process that started a rank may take to say how it ended [s].
BETTER_REPORT = 2.0


class LostPeers:
    """Makes records of the ranks that the side channel misses, and hands them on when nobody knows better.

    Whoever started a rank knows its signal or exit code, and gets a moment to send it. Of rank 0 that is often
    nobody of ours.
    """

    def __init__(
        self,
        channel: SideChannel,
        *,
        patience: Callable[[], float],  # how long a better report may take at most [s]
        then: Callable[[FailureRecord], None],  # called in a thread of its own, which may wait
    ) -> None:
        self._channel, self._patience, self._then = channel, patience, then
        self.any = False  # whether a rank is known to be gone
        channel.watch_peers(on_lost=self._gone, on_silent=self._silent)

    def _gone(self, rank: int, reason: str) -> None:
        self.any = True
        seconds = min(BETTER_REPORT, self._patience()) if rank != 0 else 0.0
        self._hand_on(rank, f"its process has ended without reporting an error ({reason})", seconds)

    def _silent(self, rank: int, seconds: float, reason: str) -> None:
        self._hand_on(rank, f"no heartbeat for {seconds:.0f} s: {reason}", 0.0)

    def _hand_on(self, rank: int, summary: str, seconds: float) -> None:
        """Hand on what the receiving thread has found, which must not wait itself."""
        host, pid = self._channel.process_of(rank)
        record = FailureRecord(rank, self._channel.world_size, host, pid, "vanished", summary)

        def wait() -> None:
            time.sleep(seconds)
            self._then(record)

        threading.Thread(target=wait, name="lockstep-lost", daemon=True).start()
