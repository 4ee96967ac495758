"""Do all ranks mean the same operation? Asked before each one, for a few microseconds.

MPI itself does not ask: with different shapes it truncates on one rank and hands out wrong numbers on another.
Each rank turns what it is about to do into a number; one all-reduce of 24 bytes tells whether the numbers are
equal. Only when they are not do the ranks tell each other what they meant, so that all raise the same error.

The same question settles whether all ranks may block in MPI. A rank that is about to block for another group
may not, since that group's other ranks may be waiting for it while it waits here.
"""

from __future__ import annotations

import array
import hashlib
import os
import sys
from collections.abc import Generator, Hashable, Sequence
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI
from torch import Tensor

from lightning_lockstep.distributed.mpi.progress import Body
from lightning_lockstep.errors import CollectiveMismatchError

__all__ = ["Meaning", "RankCheck", "call_site", "may_all_block", "mismatch_message"]


class Meaning(NamedTuple):
    """What one rank is about to do.

    Attributes:
        operation: Name of the collective, with its root or its reduction.
        dtype: Dtype of its tensors.
        shape: Their shapes.
        site: Where it was called from.
    """

    operation: str
    dtype: str
    shape: str
    site: str


def mismatch_message(group: str, number: int, meanings: Sequence[Meaning]) -> str:
    """Return the table of what each rank meant, with those marked that differ from most.

    Args:
        group: Name of the group.
        number: Which of its collectives it was, counted from 1.
        meanings: One for each rank of the group, in order.

    Ranks: any rank, alone.
    """
    said = [(meaning.operation, meaning.dtype, meaning.shape) for meaning in meanings]
    usual = max(said, key=said.count)
    rows = [("rank", "operation", "dtype", "shape", "called from", "")]
    rows += [
        (str(rank), m.operation, m.dtype, m.shape, m.site, "<- differs" if said[rank] != usual else "")
        for rank, m in enumerate(meanings)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]
    table = "\n".join(line.rstrip() for line in lines)
    return (
        f"ranks disagree on collective #{number} of group {group!r}\n\n{table}\n\n"
        "Make the operation, the shapes and the dtypes equal on all ranks before the call, or use"
        " lightning_lockstep.gather_uneven()."
    )


def may_all_block(comm: Any, *, busy: bool) -> Generator[list[Any], None, bool]:
    """Wait until all ranks have come, and return whether none of them is busy.

    Ranks: all of the communicator; one all-reduce of 8 bytes.
    """
    memory = array.array("q", [busy])
    yield [comm.Iallreduce(MPI.IN_PLACE, [memory, 1, MPI.INT64_T], MPI.MAX)]
    return not memory[0]


class RankCheck:
    """Compares the operations of one group.

    Args:
        comm: Communicator of the group, used by one operation at a time.
        group: Name of the group.
    """

    def __init__(self, comm: Any, group: str) -> None:
        self._comm, self._group = comm, group
        self._numbers: dict[Hashable, int] = {}
        self._memory = array.array("q", [0, 0, 0])  # faster to fill than numpy's
        self._spec = [self._memory, 3, MPI.INT64_T]

    def agree(
        self, signature: Hashable, number: int, describe: Any, *, busy: bool
    ) -> Generator[list[Any], None, bool]:
        """Wait until all ranks have come, and raise on all of them if they mean different things.

        Args:
            signature: What this rank means; equal on all ranks where the operation is.
            number: Which collective of the group it is.
            describe: Returns this rank's :class:`Meaning`; called on a mismatch only.
            busy: Whether this rank must not block in MPI for this operation.

        Returns:
            Whether all ranks may block.

        Raises:
            CollectiveMismatchError: On every rank alike.

        Ranks: all of the group; one all-reduce of 24 bytes.
        """
        yield [self.ask(self.number_of(signature), busy=busy)]
        self.judge(number, describe)
        return not self._memory[2]

    def number_of(self, signature: Hashable) -> int:
        """Return the number that stands for a signature."""
        value = self._numbers.get(signature)
        return self._number(signature) if value is None else value

    def ask(self, value: int, *, busy: bool) -> Any:
        """Start the comparison and return its request.

        Ranks: all of the group; one all-reduce of 24 bytes.
        """
        memory = self._memory
        memory[0], memory[1], memory[2] = value, -value, busy
        return self._comm.Iallreduce(MPI.IN_PLACE, self._spec, MPI.MAX)

    def judge(self, number: int, describe: Any) -> None:
        """Raise if the comparison has found a difference.

        Raises:
            CollectiveMismatchError: On every rank alike.

        Ranks: all of the group, once the request is complete; a gather, on a mismatch only.
        """
        if self._memory[0] != -self._memory[1]:
            meanings = self._comm.allgather(describe())
            raise CollectiveMismatchError(mismatch_message(self._group, number, meanings))

    def agree_on_sizes(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], number: int, name: str, site: str
    ) -> Body:
        """Compare what each rank sends with what the others expect from it.

        Args:
            outputs: Where this rank wants the parts of each rank.
            inputs: What it sends to each rank.
            number: Which collective of the group it is.
            name: What it is called in messages.
            site: Where it was called from.

        Raises:
            CollectiveMismatchError: On every rank alike.

        Ranks: all of the group; an all-to-all of 8 bytes a rank, and an all-reduce of 8 bytes.
        """
        sent = numpy.array([tensor.numel() for tensor in inputs], numpy.int64)
        coming = numpy.zeros_like(sent)
        yield [self._comm.Ialltoall([sent, 1, MPI.INT64_T], [coming, 1, MPI.INT64_T])]
        expected = numpy.array([tensor.numel() for tensor in outputs], numpy.int64)
        wrong = numpy.array([int((coming != expected).any())], numpy.int64)
        yield [self._comm.Iallreduce(MPI.IN_PLACE, wrong, MPI.MAX)]
        if wrong[0]:
            dtype = str(outputs[0].dtype).removeprefix("torch.")
            shape = f"sends {sent.tolist()}, expects {expected.tolist()} elements"
            meanings = self._comm.allgather(Meaning(name, dtype, shape, site))
            raise CollectiveMismatchError(mismatch_message(self._group, number, meanings))

    def _number(self, signature: Hashable) -> int:
        if len(self._numbers) > 10_000:
            self._numbers.clear()
        digest = hashlib.blake2b(repr(signature).encode(), digest_size=8).digest()
        value = self._numbers[signature] = int.from_bytes(digest, "big") >> 1
        return value


_INSIDE = (f"{os.sep}torch{os.sep}", f"{os.sep}lightning_lockstep{os.sep}distributed{os.sep}")


def call_site() -> str:
    """Return ``file.py:12 in function`` of the nearest caller outside torch and this room.

    Ranks: any rank, alone; some microseconds.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _INSIDE):
            return f"{name.rpartition(os.sep)[2]}:{frame.f_lineno} in {frame.f_code.co_name}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "backward" if frame is not None else ""


def shapes_of(tensors: Sequence[Tensor]) -> str:
    """Return the shapes in short: one, or a list of them."""
    shapes = [str(tuple(tensor.shape)) for tensor in tensors]
    if len(set(shapes)) == 1:
        return shapes[0] if len(shapes) == 1 else f"{len(shapes)} x {shapes[0]}"
    return ", ".join(shapes[:8]) + (", ..." if len(shapes) > 8 else "")
