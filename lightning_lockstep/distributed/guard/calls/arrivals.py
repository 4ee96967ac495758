"""When this rank has called its last collectives, over whatever backend."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightning_lockstep.distributed.guard.calls.flight_recorder import FlightRecorder
from lightning_lockstep.distributed.guard.calls.group_recorders import GroupRecorders
from lightning_lockstep.distributed.guard.calls.recorded import Arrival

__all__ = ["ArrivalReader"]


class ArrivalReader:
    """Reads the collectives that this rank calls from now on: those of gloo, nccl and ``mpi4py``."""

    def __init__(self) -> None:
        self._recorder, self._groups = FlightRecorder(), GroupRecorders()
        self.seconds = 0.0  # how long the last `read` took

    def read(self, since: float) -> Sequence[Arrival]:
        """Return the last calls of all groups that exist, oldest first, from ``since`` on [s since 1970]."""
        began = time.perf_counter()
        found = [*self._recorder.arrivals(since)]
        found += self._groups.arrivals(since)
        found.sort(key=lambda arrival: arrival.time)
        self.seconds = time.perf_counter() - began
        return found
