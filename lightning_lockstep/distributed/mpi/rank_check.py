"""What a rank knows of the others of a group: whether they call the same, which have exited, the last calls."""

from __future__ import annotations

import array
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.failure.record import own_place
from lightning_lockstep.distributed.guard.collective_call import (
    CollectiveCall,
    batch_number,
    fingerprint,
    mismatch_report,
)
from lightning_lockstep.distributed.guard.records import Arrival, Outstanding, RecordedCall
from lightning_lockstep.distributed.mpi.progress import Body
from lightning_lockstep.distributed.mpi.runtime import MPIRuntime
from lightning_lockstep.errors import CollectiveMismatchError, CollectiveStallError

# -- The last collectives of one group of the backend ``mpi4py``, for the guard --

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


# -- Do all ranks call the same operation? Asked over MPI before each one, for a few microseconds --
# MPI itself does not ask: with different shapes it truncates on one rank and gives wrong numbers on
# another. Each rank turns what it is about to do into a number; one all-reduce of 24 bytes shows whether
# the numbers are equal. Only when they are not do the ranks exchange what they called, so that all raise
# the same error.
#
# The same question settles whether all ranks may block in MPI. A rank that is about to block for another
# group may not, since that group's other ranks may be waiting for it while it waits here.
#
# This module is imported once MPI is up, never before.

Describe = Callable[[], CollectiveCall]


def may_all_block(comm: Any, *, busy: bool) -> Generator[list[Any], None, bool]:
    """Wait until all ranks have arrived, and return whether none of them is busy."""
    memory = array.array("q", [busy])
    yield [comm.Iallreduce(MPI.IN_PLACE, [memory, 1, MPI.INT64_T], MPI.MAX)]
    return not memory[0]


class RankCheck:
    """Compares the operations of one group."""

    def __init__(self, comm: Any, ranks: Sequence[int]) -> None:
        self._comm, self._ranks = comm, ranks
        self._fingerprints: dict[Hashable, int] = {}
        self._memory = array.array("q", [0, 0, 0])  # of one operation at a time; faster to fill than numpy's
        self._buffer = [self._memory, 3, MPI.INT64_T]

    def agree(
        self,
        signature: Hashable,
        describe: Describe,  # called on a mismatch only
        *,
        batch: str,  # in which it was called
        busy: bool,  # this rank must not block in MPI for this operation
    ) -> Generator[list[Any], None, bool]:
        """Wait until all ranks have arrived, and raise on all of them if they call different things."""
        # Returns whether all may block.
        value = self._fingerprints.get(signature)
        if value is None:
            if len(self._fingerprints) > 10_000:
                self._fingerprints.clear()
            value = self._fingerprints[signature] = fingerprint(signature)
        value, memory = value ^ batch_number(batch), self._memory
        memory[0], memory[1], memory[2] = value, -value, busy
        yield [self._comm.Iallreduce(MPI.IN_PLACE, self._buffer, MPI.MAX)]
        if memory[0] != -memory[1]:
            raise self._mismatch(describe())
        return not memory[2]

    def agree_on_sizes(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], describe: Describe) -> Body:
        """Compare what each rank sends with what the others expect from it."""
        sent = numpy.array([tensor.numel() for tensor in inputs], numpy.int64)
        coming = numpy.zeros_like(sent)
        yield [self._comm.Ialltoall([sent, 1, MPI.INT64_T], [coming, 1, MPI.INT64_T])]
        expected = numpy.array([tensor.numel() for tensor in outputs], numpy.int64)
        wrong = numpy.array([int((coming != expected).any())], numpy.int64)
        yield [self._comm.Iallreduce(MPI.IN_PLACE, wrong, MPI.MAX)]
        if wrong[0]:
            note = f"sends {sent.tolist()}, expects {expected.tolist()} elements"
            raise self._mismatch(replace(describe(), note=note))

    def _mismatch(self, call: CollectiveCall) -> CollectiveMismatchError:
        own = replace(call, where=own_place(batches=True)).to_data()
        calls = [CollectiveCall.from_data(data) for data in self._comm.allgather(own)]
        return CollectiveMismatchError(mismatch_report(dict(zip(self._ranks, calls, strict=True))))


# -- Which ranks of a group have exited or did not arrive, and the error that names them --

# How long after its exit a rank may still take part through what it has sent before [s].
_IN_FLIGHT = 5.0


class Peers:
    """The ranks of one group, as one of them knows them."""

    def __init__(
        self, store: Any, runtime: MPIRuntime, comm: Any, *, group: str, ranks: Sequence[int]
    ) -> None:
        self._store, self._runtime, self._comm = store, runtime, comm
        self._group, self._ranks = group, ranks
        self._in_world = runtime.ranks_of(comm)

    def any_exited(self) -> bool:
        """Return whether a rank has exited, longer ago than what it has sent can be on its way."""
        exited = self._runtime.exited
        return bool(exited) and any(self._runtime.exited_for(rank) > _IN_FLIGHT for rank in self._in_world)

    def error(
        self,
        title: str,
        number: int | None,  # of the collective in its group; None: a message between two ranks
        seconds: float,  # how long this rank has waited
    ) -> CollectiveStallError:
        """Return the error for an operation in which not all ranks take part."""
        exited = [i for i, rank in enumerate(self._in_world) if rank in self._runtime.exited]
        if exited:
            return CollectiveStallError(
                f"{title} of group {self._group!r} over MPI cannot complete: {self._listed(exited)} exited"
                " without calling it. Every rank must call the same collectives; look for a return, a"
                " sys.exit() or a loop that ends early there."
            )
        missing = "the other end did not answer" if number is None else self._missing(number)
        return CollectiveStallError(
            f"{title} of group {self._group!r} timed out after {seconds:g} s over MPI: {missing}."
            " Every rank must call the same collectives in the same order; raise the timeout if a rank is"
            " only slow."
        )

    def _missing(self, number: int) -> str:
        """Return which ranks have not arrived: those without a note of a time-out in the store."""
        own = self._comm.rank
        others = [rank for rank in range(self._comm.size) if rank != own]
        with suppress(dist.DistError):
            self._store.set(f"stalled/{number}/{self._ranks[own]}", b"1")
            time.sleep(0.5)  # in which the others note that they, too, have timed out
            others = [
                rank for rank in others if not self._store.check([f"stalled/{number}/{self._ranks[rank]}"])
            ]
        if not others:
            return f"all ranks have arrived at collective #{number}, but not at the same time"
        return f"{self._listed(others)} did not arrive at collective #{number}"

    def _listed(self, members: Sequence[int]) -> str:
        return ranks_in_words(self._ranks[member] for member in members)
