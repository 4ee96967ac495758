"""Do all ranks call the same operation? Asked over MPI before each one, for a few microseconds.

MPI itself does not ask: with different shapes it truncates on one rank and gives wrong numbers on another. Each
rank turns what it is about to do into a number; one all-reduce of 24 bytes shows whether the numbers are equal.
Only when they are not do the ranks exchange what they called, so that all raise the same error.

The same question settles whether all ranks may block in MPI. A rank that is about to block for another group
may not, since that group's other ranks may be waiting for it while it waits here.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy
from mpi4py import MPI
from torch import Tensor

from lightning_lockstep.distributed.guard.calls.call_report import (
    CollectiveCall,
    fingerprint,
    mismatch_report,
)
from lightning_lockstep.distributed.mpi.progress import Body
from lightning_lockstep.errors import CollectiveMismatchError

__all__ = ["RankCheck", "may_all_block"]

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
        busy: bool,  # this rank must not block in MPI for this operation
    ) -> Generator[list[Any], None, bool]:
        """Wait until all ranks have arrived, and raise on all of them if they call different things.

        Returns whether all may block.
        """
        value = self._fingerprints.get(signature)
        if value is None:
            if len(self._fingerprints) > 10_000:
                self._fingerprints.clear()
            value = self._fingerprints[signature] = fingerprint(signature)
        memory = self._memory
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
        calls = [CollectiveCall.from_data(data) for data in self._comm.allgather(call.to_data())]
        return CollectiveMismatchError(mismatch_report(dict(zip(self._ranks, calls, strict=True))))
