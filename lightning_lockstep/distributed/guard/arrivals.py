"""When this rank has called its last collectives, over whatever backend."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence

from lightning_lockstep.distributed.guard.flight_recorder import FlightRecorder
from lightning_lockstep.distributed.guard.recorded import Arrival

__all__ = ["ArrivalLog", "ArrivalReader"]

#: Calls that a log holds, as many as the flight recorder's ring.
_CALLS = 512

_logs: weakref.WeakSet[ArrivalLog] = weakref.WeakSet()


class ArrivalLog:
    """Notes the calls of one process group that torch's flight recorder does not see; read while it exists.

    Args:
        group: Name of the group, the same on all of its ranks.

    Ranks: one for each group, on every rank of it; nothing is sent.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self._calls: deque[tuple[int, float]] = deque(maxlen=_CALLS)
        _logs.add(self)

    def note(self, number: int) -> None:
        """Note that collective ``number`` of the group is called now; a fraction of a microsecond."""
        self._calls.append((number, time.time()))

    def arrivals(self, since: float) -> list[Arrival]:
        """Return what was noted, without what is older than ``since``, oldest first."""
        # The copy is made in one piece: another thread may be noting a call.
        return [Arrival(self.group, number, at) for number, at in self._calls.copy() if at >= since]


class ArrivalReader:
    """Reads the collectives that this rank calls from now on: those of gloo, nccl and ``mpi4py``.

    Attributes:
        seconds: How long the last :meth:`read` took [s].
    """

    def __init__(self) -> None:
        self._recorder = FlightRecorder()
        self.seconds = 0.0

    def read(self, since: float) -> Sequence[Arrival]:
        """Return the last calls of all groups that exist, oldest first.

        Args:
            since: Earlier ones are left out [s since 1970, by this host's clock].

        Ranks: any rank, alone; nothing is sent.
        """
        began = time.perf_counter()
        found = [*self._recorder.arrivals(since)]
        for log in list(_logs):
            found += log.arrivals(since)
        found.sort(key=lambda arrival: arrival.time)
        self.seconds = time.perf_counter() - began
        return found
