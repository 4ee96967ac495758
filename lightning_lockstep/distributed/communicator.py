"""Collectives that callbacks and strategies use to decide together.

Control messages travel on the CPU, whatever the device of the model, so that a decision never waits for a
GPU queue. One process has a communicator too, the null object that answers for a world of one.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_lockstep.distributed.side_channel.base import LocalSideChannel, SideChannel

__all__ = ["Agreement", "Communicator", "PendingReduction", "ReduceOperation", "SingleProcessCommunicator"]

ReduceOperation = Literal["sum", "mean", "min", "max"]


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after :meth:`Communicator.agree`, the same on each.

    Attributes:
        reasons: Reason of each rank that raised its flag, by rank. Empty when none did; then the agreement
            is false in a boolean context.
    """

    reasons: Mapping[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {reason}" for rank, reason in sorted(self.reasons.items()))


class PendingReduction:
    """A reduction that is under way.

    Args:
        tensor: The tensor that will hold the result.
        work: Handle of the operation, or ``None`` when it is complete already.
        divide_by: What the result is divided by once it is there.
    """

    def __init__(self, tensor: Tensor, work: Any | None, divide_by: int = 1) -> None:
        self._tensor, self._work, self._divide_by = tensor, work, divide_by

    def done(self) -> bool:
        """Return whether :meth:`wait` would return at once."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> Tensor:
        """Wait for the result and return it, the same tensor that was given."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._divide_by != 1:
                self._tensor.div_(self._divide_by)
        return self._tensor


class Communicator(ABC):
    """How the ranks of a run decide together.

    Attributes:
        rank: Number of this rank, from 0.
        world_size: Number of ranks.
        local_rank: Number of this rank on its node, from 0.
        node_rank: Number of this rank's node, from 0.
        host: Host name of this rank's node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0

    def __init__(self) -> None:
        self.host = socket.gethostname()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    @abstractmethod
    def side_channel(self) -> SideChannel:
        """The channel for messages that must wait for no rank.

        Ranks: the first access waits until rank 0 has made its own first access; our strategies open the
        channel at start-up. After that any rank may use it alone.
        """

    @abstractmethod
    def gather(self, obj: Any) -> list[Any]:
        """Return the object of every rank, in rank order, on every rank.

        Args:
            obj: A small picklable object.

        Ranks: all, together; two small collectives on the CPU.
        """

    @abstractmethod
    def broadcast(self, obj: Any, source: int = 0) -> Any:
        """Return the object of rank ``source`` on every rank.

        Args:
            obj: A small picklable object; ignored on other ranks.
            source: Rank that has it.

        Ranks: all, together; two small collectives on the CPU.
        """

    @abstractmethod
    def all_reduce_async(self, tensor: Tensor, op: ReduceOperation = "sum") -> PendingReduction:
        """Start to reduce a CPU tensor over all ranks, in place, and return at once.

        Args:
            tensor: CPU tensor of the same shape and dtype on every rank. Floating for ``"mean"``.
            op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``.

        Returns:
            A handle; its ``wait()`` gives the tensor.

        Ranks: all, together and in the same order as their other collectives; one all-reduce.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has arrived here.

        Ranks: all, together.
        """

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum") -> Tensor:
        """Reduce a CPU tensor over all ranks, in place, and return it.

        Args:
            tensor: CPU tensor of the same shape and dtype on every rank.
            op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``.

        Ranks: all, together; one all-reduce.
        """
        return self.all_reduce_async(tensor, op).wait()

    def agree(self, flag: bool, reason: str = "") -> Agreement:
        """Find out together whether any rank raises its flag, and why.

        This is how a fault on one rank becomes a decision of all: raise or branch on the answer, never on
        one's own flag.

        Args:
            flag: Whether this rank raises its flag.
            reason: Why it does.

        Returns:
            The reasons of all ranks whose flag is up, the same on every rank.

        Ranks: all, together; one all-reduce of 4 bytes, and a gather only when a flag is up.
        """
        any_flag = self.all_reduce(torch.tensor(int(flag), dtype=torch.int32), "max")
        if not int(any_flag):
            return Agreement()
        reasons = self.gather(reason if flag else None)
        return Agreement({rank: text for rank, text in enumerate(reasons) if text is not None})


class SingleProcessCommunicator(Communicator):
    """The communicator of a run with one process, which decides alone."""

    def __init__(self) -> None:
        super().__init__()
        self._side_channel = LocalSideChannel()

    @property
    def side_channel(self) -> SideChannel:
        """See :attr:`Communicator.side_channel`."""
        return self._side_channel

    def gather(self, obj: Any) -> list[Any]:
        """See :meth:`Communicator.gather`."""
        return [obj]

    def broadcast(self, obj: Any, source: int = 0) -> Any:
        """See :meth:`Communicator.broadcast`."""
        return obj

    def all_reduce_async(self, tensor: Tensor, op: ReduceOperation = "sum") -> PendingReduction:
        """See :meth:`Communicator.all_reduce_async`."""
        return PendingReduction(tensor, None)

    def barrier(self) -> None:
        """See :meth:`Communicator.barrier`."""
