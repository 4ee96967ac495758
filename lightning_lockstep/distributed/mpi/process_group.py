"""The process group of the backend ``mpi4py``: what torch calls, turned into operations.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.distributed.mpi.arguments import one
from lightning_lockstep.distributed.mpi.call_records import CallRecords
from lightning_lockstep.distributed.mpi.group_engine import GroupEngine, GroupSettings
from lightning_lockstep.distributed.mpi.point_to_point import Messages
from lightning_lockstep.distributed.mpi.reductions import Reductions
from lightning_lockstep.distributed.mpi.runtime import MPIRuntime
from lightning_lockstep.distributed.mpi.transfers import Transfers

__all__ = ["MPIProcessGroup"]


class MPIProcessGroup(Reductions, Transfers, dist.ProcessGroup):
    """A group of ranks as an MPI communicator."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        runtime: MPIRuntime,
        collectives: Any,  # communicator
        messages: Any,  # communicator for sends and receives
        settings: GroupSettings,
    ) -> None:
        # Torch 2.13 takes no store here from a subclass in Python.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._name, self._desc = rank, size, settings.name, ""
        self.engine = GroupEngine(store, runtime, collectives, settings)
        self._comm, self._messages = collectives, Messages(messages, collectives)

    # -- name, rank and size ---------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "mpi4py"

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """Return this rank, in the group."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        return self._size

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch's name
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._desc

    def __repr__(self) -> str:
        return f"MPIProcessGroup({self._name!r}, rank {self._rank} of {self._size})"

    # -- messages --------------------------------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        tensor = one(tensors)
        return self.engine.message(
            f"send to {to}", tensor, lambda t: self._messages.send(t[0], to, tag), written=False
        )

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._receive(one(tensors), source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from whichever rank sends one first."""
        return self._receive(one(tensors), None, tag)

    def _receive(self, tensor: Tensor, source: int | None, tag: int) -> Any:
        sender: list[int] = []
        name = "receive from any rank" if source is None else f"receive from {source}"
        work = self.engine.message(
            name, tensor, lambda t: self._messages.receive(t[0], source, tag, sender.append), written=True
        )
        work.senders = sender
        return work

    # -- the rest of torch's contract ------------------------------------------------------------------

    _allgather_base = Transfers.all_gather_single
    allgather_into_tensor_coalesced = Transfers.all_gather_single_coalesced
    _reduce_scatter_base = Reductions.reduce_scatter_single
    reduce_scatter_tensor_coalesced = Reductions.reduce_scatter_single_coalesced
    alltoall_base = Transfers.all_to_all_single

    @property
    def call_recorder(self) -> CallRecords:
        """The last collectives of the group, for the guard."""
        return self.engine.records

    @property
    def compares_calls(self) -> bool:
        """Whether the ranks are compared before each operation, so that nobody else needs to."""
        return self.engine.check is not None

    @property
    def supports_coalescing(self) -> bool:
        """Whether operations may be started one by one and waited for together."""
        return True

    def _start_coalescing(self, device: torch.device) -> None:
        self.engine.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.engine.end_coalescing()

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation waits for other ranks."""
        self.engine.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Abort the group: operations that come fail."""
        self.engine.abort()

    def shutdown(self) -> None:
        """Give the communicators back."""
        self.engine.free([self._messages.headers, self._comm])
