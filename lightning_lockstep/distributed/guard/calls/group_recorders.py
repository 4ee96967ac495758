"""The collectives of process groups that are written in Python, such as those of the backend ``mpi4py``."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_lockstep._doors.torch_internals import stores_of_groups
from lightning_lockstep.distributed.guard.calls.recorded import (
    Arrival,
    CallRecorder,
    Outstanding,
    RecordedCall,
)
from lightning_lockstep.distributed.process_group import process_group_exists

__all__ = ["GroupRecorders"]


class GroupRecorders:
    """The recorders of such groups, which torch's flight recorder does not see: each has a ``call_recorder``."""

    @property
    def is_recording(self) -> bool:
        """Whether any of them has recorded anything yet."""
        return any(recorder.is_recording for recorder in _group_recorders())

    def outstanding(self) -> Sequence[Outstanding]:
        """See :meth:`CallRecorder.outstanding`."""
        return [one for recorder in _group_recorders() for one in recorder.outstanding()]

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        """See :meth:`CallRecorder.calls`."""
        calls = [call for recorder in _group_recorders() for call in recorder.calls(sites=sites)]
        return sorted(calls, key=lambda one: one.started)

    def arrivals(self, since: float) -> Sequence[Arrival]:
        """See :meth:`CallRecorder.arrivals`."""
        arrivals = [one for recorder in _group_recorders() for one in recorder.arrivals(since)]
        return sorted(arrivals, key=lambda one: one.time)


def _group_recorders() -> list[CallRecorder]:
    if not process_group_exists():
        return []
    return [group.call_recorder for group in stores_of_groups() if hasattr(group, "call_recorder")]
