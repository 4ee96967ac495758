"""A small gloo group beside a process group, over which its ranks compare what they are about to call.

Ranks of one host compare over sockets instead, in half the time (``host_sockets.py``).

It is built by the ranks of the group alone, and torch.distributed does not know of it: what is sent over it goes past
torch's dispatcher, and is not seen by whoever watches that.
"""

from __future__ import annotations

import array
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_lockstep.distributed.guard.verification.host_sockets import HostSockets, host_identity

__all__ = ["Companion"]

_PREFIX = "lightning_lockstep/verify"
_ARRIVED = "arrived"


class Companion:
    """Compares numbers and exchanges texts between the ranks of a group; used by one thread at a time."""

    def __init__(self, store: dist.Store, rank: int, size: int, *, timeout: float) -> None:
        # A connection of its own, so that nobody else has to wait for the store meanwhile.
        own = dist.PrefixStore(_PREFIX, store.clone() if hasattr(store, "clone") else store)
        number = _wait_for_all(own, size, timeout)  # DistStoreError: not all came in time
        self._size, self._timeout = size, timeout  # of each comparison, too [s]
        # Torch states no types for its methods.
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(str(number), own), rank, size, timedelta(seconds=timeout)
        )
        self._memory = array.array("q", [0, 0])  # faster to read and fill than a tensor
        self._tensors = [torch.frombuffer(self._memory, dtype=torch.int64)]
        self._max, self._sum = dist.AllreduceOptions(), dist.AllreduceOptions()
        self._max.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._sum.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        self._unset = self._max.timeout
        self._sockets = self._host_sockets(rank)

    def all_equal(self, number: int, *, timeout: float | None = None) -> bool:
        """Return whether all ranks, which all ask, have the same number, of 63 bits at most."""
        if self._sockets is not None:
            return self._sockets.all_equal(number, timeout=self._timeout if timeout is None else timeout)
        memory = self._memory
        memory[0], memory[1] = number, -number
        self._reduce(self._max, timeout)
        return memory[0] == -memory[1]

    def sum_is_zero(self, number: int, *, timeout: float | None = None) -> bool:
        """Return whether the numbers of all ranks add up to 0; the sum must have at most 63 bits."""
        if self._sockets is not None:
            return self._sockets.sum_is_zero(number, timeout=self._timeout if timeout is None else timeout)
        self._memory[0] = number
        self._reduce(self._sum, timeout)
        return self._memory[0] == 0

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in the order of the group."""
        lengths = [int(row.item()) for row in self._gather(torch.tensor([len(data)]))]
        framed = torch.frombuffer(bytearray(data.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
        rows = self._gather(framed)
        return [row.numpy().tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]

    def _host_sockets(self, rank: int) -> HostSockets | None:
        """Return sockets to the other ranks where all are on one host, and all of them could connect."""
        hosts = set(self.exchange(host_identity().encode()))
        if len(hosts) > 1 or hosts == {b""}:
            return None
        made = None
        with suppress(OSError):
            made = HostSockets(rank, self._size, lambda path: self.exchange(path)[0])
        self._memory[0] = 0 if made is not None else 1
        self._reduce(self._sum, None)
        return made if self._memory[0] == 0 else None

    def _reduce(self, options: Any, timeout: float | None) -> None:
        options.timeout = self._unset if timeout is None else timedelta(seconds=timeout)
        self._group.allreduce(self._tensors, options).wait()

    def _gather(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = [torch.empty_like(own) for _ in range(self._size)]
        self._group.allgather([rows], [own]).wait()
        return rows


def _wait_for_all(store: dist.Store, size: int, timeout: float) -> int:
    """Wait until all ranks are here, and return how many companions were made over this store before.

    The ranks are counted rather than named: a group may be made anew with the name of an earlier one, and have the
    same store. Nobody can arrive for the next companion before all have arrived for this one. It is Python that waits,
    so that a signal is noticed.
    """
    arrived = store.add(_ARRIVED, 1)
    number = (arrived - 1) // size
    deadline, pause = time.monotonic() + timeout, 0.001
    while arrived < (number + 1) * size:
        if time.monotonic() > deadline:
            missing = (number + 1) * size - arrived
            raise dist.DistStoreError(
                f"Timed out after {timeout:g} s: {missing} of {size} ranks have not called the first collective of"
                " their process group."
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
        arrived = store.add(_ARRIVED, 0)
    return number
