"""The last collectives of one group of the backend ``mpi4py``, for the guard."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_lockstep.distributed.guard.calls.call_report import CollectiveCall
from lightning_lockstep.distributed.guard.calls.recorded import Arrival, Outstanding, RecordedCall

__all__ = ["CallRecords"]

_KEPT = 512


class _Record(NamedTuple):
    number: int
    started: float
    operation: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    reduce_op: str | None
    root: int | None
    site: str


class CallRecords:
    """Remembers the last collectives of a group; a :class:`CallRecorder` that keeps no tensor alive."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._records: deque[_Record] = deque(maxlen=_KEPT)
        self._open: dict[int, None] = {}  # numbers, in the order of the calls

    def begin(
        self,
        number: int,
        operation: str,
        tensors: Sequence[torch.Tensor],
        reduce_op: str | None,
        root: int | None,
        site: str,
    ) -> None:
        """Note that a collective was called; about a microsecond."""
        dtypes, shapes = tuple({t.dtype for t in tensors}), tuple(t.shape for t in tensors)
        self._records.append(_Record(number, time.time(), operation, dtypes, shapes, reduce_op, root, site))
        self._open[number] = None

    def end(self, number: int) -> None:
        """Note that a collective is complete, or has failed."""
        self._open.pop(number, None)

    @property
    def is_recording(self) -> bool:
        """Whether a collective was called yet."""
        return bool(self._records)

    def outstanding(self) -> Sequence[Outstanding]:
        """See :meth:`CallRecorder.outstanding`."""
        number = next(iter(tuple(self._open)), None)
        return [] if number is None else [Outstanding(self._group, number)]

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        """See :meth:`CallRecorder.calls`."""
        return [self._recorded(record) for record in self._records.copy()]

    def arrivals(self, since: float) -> Sequence[Arrival]:
        """See :meth:`CallRecorder.arrivals`."""
        return [
            Arrival(self._group, one.number, one.started)
            for one in self._records.copy()
            if one.started >= since
        ]

    def _recorded(self, record: _Record) -> RecordedCall:
        call = CollectiveCall(
            operation=record.operation,
            group=self._group,
            number=record.number,
            dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in record.dtypes),
            shapes=tuple(tuple(shape) for shape in record.shapes),
            reduce_op=record.reduce_op,
            root=record.root,
            site=record.site,
        )
        return RecordedCall(call=call, started=record.started, done=record.number not in self._open)
