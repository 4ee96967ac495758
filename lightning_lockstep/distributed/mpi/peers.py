"""Which ranks of a group have exited or did not arrive, and the error that names them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.mpi.runtime import MPIRuntime
from lightning_lockstep.errors import CollectiveStallError

__all__ = ["Peers"]

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
