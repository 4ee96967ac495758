"""Sums through memory that the ranks of a node share: faster than messages where all of them may look into it.

An MPI library reduces a large tensor by sending itself pieces of it, which are copied several times. Here each
rank copies its piece into its own slot once, and the ranks add from each other's slots while these are in the
cache of the processor. On one node that is the whole reduction. Over several nodes each rank first sums its
slice of the piece on its node, then reduces that slice with its counterparts on the other nodes over MPI, so
that each number crosses the network once for each node instead of once for each rank.

Ranks wait for each other by counting, each in a place of its own that the others read. Nothing blocks, so a rank
that is late, dead or has raised is noticed as in every other operation. Each rank has several slots and uses them
in turn: whoever sees that all have come with one piece knows that nobody reads the piece before it any more. Two
would do, but to write what another core has just read takes up to ten times as long where the two cores do not
share a cache, so there are as many as the memory allows.

The processor must let others see what a core writes in the order in which it was written, as x86-64 does; Python has no
fence for those that don't. NumPy does the arithmetic: it uses one thread, where torch would start a team of them
beside the one of the backward pass.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

import array
import mmap
import os
import platform
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from lightning_lockstep.distributed.mpi.limits import LIMITS
from lightning_lockstep.distributed.mpi.progress import Body

__all__ = ["NodeMemory", "open_node_memory"]

_LINE = 64  # bytes of a line of the cache, which no two ranks share
_ORDERED = ("x86_64", "amd64")


class _Meeting:
    """What waits, as a request of MPI would, until all ranks of the node have counted to a number.

    Args:
        counts: How far each rank has counted; 8 bytes, which are read and written at once.
        number: The number.
    """

    __slots__ = ("_counts", "_number", "_seen")

    def __init__(self, counts: memoryview, number: int) -> None:
        self._counts, self._number, self._seen = counts, number, 0

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """Return whether all have come."""
        counts = self._counts
        while self._seen < len(counts):
            if counts[self._seen] < self._number:
                return False
            self._seen += 1
        return True


class NodeMemory:
    """Shared memory of the ranks of one group on one node; taken when it is first used.

    Args:
        comm: Communicator of the group.
        node: Communicator of its ranks on this node.
        across: Communicator of the ranks with this one's place on their nodes; ``None`` on a single node.
        leader: Process number of the first rank of the node.
    """

    def __init__(self, comm: Any, node: Any, across: Any, leader: int) -> None:
        self.node, self.across = node, across
        self._comm, self._leader = comm, leader
        self._layout = _layout(node.size)
        self._failed = False
        self._slots: NDArray[Any] | None = None
        self._counts = memoryview(b"")
        self._turn, self._met = 0, 0

    @property
    def communicators(self) -> list[Any]:
        """What MPI is to get back when the group ends."""
        return [self.node] + ([self.across] if self.across is not None else [])

    def ready(self) -> Generator[Iterable[Any], None, bool]:
        """Return whether the memory is there; the first time, take it.

        The first rank of the node makes a file in memory that has no name, so that nothing is left behind whatever
        happens, and the others map it too. It fails where a node has no memory left, or ranks in containers that do
        not see each other's processes. All ranks find out, and alike.

        Ranks: all of the group; two all-reduces of 8 bytes, the first time.
        """
        if self._slots is None and not self._failed:
            own = _new_file(self._layout.nbytes) if self.node.rank == 0 else -1
            file = yield from _agree(self.node, own, MPI.MAX)
            memory = _mapped(Path(f"/proc/{self._leader}/fd/{file}"), self._layout.nbytes)
            on_all = yield from _agree(self._comm, int(memory is not None), MPI.MIN)
            if own >= 0:
                os.close(own)
            if memory is not None and on_all:
                self._use(memory)
            self._failed = not on_all
        return not self._failed

    def sum(self, tensor: Tensor, over_nodes: Any) -> Body:
        """Sum a tensor of numbers in place, once the memory is ready.

        Args:
            tensor: Contiguous, in the memory of the CPU; of equal shape and dtype on all ranks.
            over_nodes: Makes, of a communicator and a flat tensor, the operation that sums it over nodes.

        Ranks: all of the group; one wait for the node for each piece, or two and a reduction over nodes.
        """
        assert self._slots is not None
        flat = tensor.view(-1).numpy()
        slots = self._slots.view(flat.dtype)
        two = self.node.size == 2 and self.across is None
        length = slots.shape[2]
        for start in range(0, len(flat), length):
            piece = flat[start : start + length]
            shared = slots[self._turn, :, : len(piece)]
            self._turn = (self._turn + 1) % len(slots)
            yield from self._of_two(piece, shared) if two else self._by_slices(piece, shared, over_nodes)

    def _use(self, memory: mmap.mmap) -> None:
        layout = self._layout
        self._counts = memoryview(memory)[: self.node.size * _LINE].cast("q")[:: _LINE // 8]
        slots = np.frombuffer(memory, np.uint8, offset=layout.start)
        self._slots = slots.reshape(layout.turns, self.node.size, layout.slot)

    def _meet(self) -> _Meeting:
        """Say that this rank has come so far, and return what is complete once all have."""
        self._met += 1
        self._counts[self.node.rank] = self._met
        return _Meeting(self._counts, self._met)

    def _of_two(self, piece: NDArray[Any], shared: NDArray[Any]) -> Body:
        rank = self.node.rank
        np.copyto(shared[rank], piece)
        yield [self._meet()]
        np.add(piece, shared[1 - rank], out=piece)

    def _by_slices(self, piece: NDArray[Any], shared: NDArray[Any], over_nodes: Any) -> Body:
        rank, size = self.node.rank, self.node.size
        ours = np.array_split(piece, size)
        theirs = [np.array_split(slot, size) for slot in shared]
        others = [other for other in range(size) if other != rank]
        for other in others:
            np.copyto(theirs[rank][other], ours[other])
        yield [self._meet()]
        for other in others:
            np.add(ours[rank], theirs[other][rank], out=ours[rank])
        if self.across is not None:
            yield from over_nodes(self.across, torch.from_numpy(ours[rank]))
        np.copyto(theirs[rank][rank], ours[rank])
        yield [self._meet()]
        for other in others:
            np.copyto(ours[other], theirs[other][other])


def open_node_memory(comm: Any, *, wanted: bool) -> NodeMemory | None:
    """Return what large sums of a group can share, or ``None`` where there is no use for it.

    There is none for groups with one rank a node, with unequal numbers of ranks on their nodes, on processors that
    show writes in any order, and on other systems than Linux.

    Args:
        comm: Communicator of the group.
        wanted: Whether this rank wants it; all must.

    Ranks: all of the group, together; all get it, or none does.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    wanted = wanted and platform.machine().lower() in _ORDERED and hasattr(os, "memfd_create")
    said = comm.allgather((wanted, node.size))
    if not all(wants and size == node.size > 1 for wants, size in said):
        node.Free()
        return None
    across = None if node.size == comm.size else comm.Split(node.rank)
    return NodeMemory(comm, node, across, node.bcast(os.getpid()))


class _Layout(NamedTuple):
    """Where things lie in the memory [bytes]: a line of the cache for each rank's count, then the slots.

    Attributes:
        start: Where the slots begin.
        slot: Size of a slot.
        turns: How many slots each rank has.
        nbytes: Size of all.
    """

    start: int
    slot: int
    turns: int
    nbytes: int


def _layout(ranks: int) -> _Layout:
    start = -(-ranks * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE
    slot = max(_LINE, min(LIMITS.slice * ranks, LIMITS.shared // (2 * ranks)) // _LINE * _LINE)
    turns = max(2, LIMITS.shared // (ranks * slot))
    return _Layout(start, slot, turns, start + turns * ranks * slot)


def _new_file(nbytes: int) -> int:
    """Return a new file in memory; -1 where there is no room for it."""
    file = os.memfd_create("lockstep")
    try:
        os.posix_fallocate(file, 0, nbytes)  # else the first touch of a page could end the process
    except OSError:
        os.close(file)
        return -1
    return file


def _mapped(path: Path, nbytes: int) -> mmap.mmap | None:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(file, nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


def _agree(comm: Any, value: int, op: Any) -> Generator[Iterable[Any], None, int]:
    """Reduce a number over a communicator, without blocking."""
    memory = array.array("q", [value])
    yield [comm.Iallreduce(MPI.IN_PLACE, [memory, 1, MPI.INT64_T], op)]
    return memory[0]
