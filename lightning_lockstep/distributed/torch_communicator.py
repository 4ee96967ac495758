"""The communicator of a process group of ``torch.distributed``, and which communicator is the current one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.distributed.backend_threads import wait_for_backend_threads
from lightning_lockstep.distributed.communicator import (
    Communicator,
    PendingReduction,
    ReduceOperation,
    SingleProcessCommunicator,
)
from lightning_lockstep.distributed.failure.process_exit import at_exit
from lightning_lockstep.distributed.process_group import (
    RankGroup,
    current_group,
    process_group_exists,
    use_group,
)
from lightning_lockstep.distributed.side_channel.base import SideChannel
from lightning_lockstep.distributed.side_channel.opening import close_side_channel, open_side_channel

__all__ = ["TorchCommunicator", "at_shut_down", "current_communicator", "shut_down", "use_communicator"]

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no average; divided afterwards
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class TorchCommunicator(Communicator):
    """The communicator of the default process group of ``torch.distributed``.

    Where that group cannot carry CPU tensors (nccl), a gloo group beside it does.

    Args:
        local_rank: Number of this rank on its node; by default ``LOCAL_RANK``, else 0.
        node_rank: Number of this rank's node; by default ``NODE_RANK`` or ``GROUP_RANK``, else 0.
        control_timeout: Longest wait for another rank in a control message [s]; by default the process
            group's own.

    Ranks: all, together, since a gloo group may have to be made.
    """

    def __init__(
        self,
        *,
        local_rank: int | None = None,
        node_rank: int | None = None,
        control_timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        environ = os.environ
        self.local_rank = int(environ.get("LOCAL_RANK", 0)) if local_rank is None else local_rank
        node = environ.get("NODE_RANK", environ.get("GROUP_RANK", 0))
        self.node_rank = int(node) if node_rank is None else node_rank
        self._group = _cpu_group(control_timeout)
        self._side_channel: SideChannel | None = None

    @property
    def side_channel(self) -> SideChannel:
        """See :attr:`Communicator.side_channel`."""
        if self._side_channel is None:
            self._side_channel = open_side_channel(broadcast=self.broadcast)
        return self._side_channel

    def gather(self, obj: Any) -> list[Any]:
        """See :meth:`Communicator.gather`."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, obj, group=self._group)
        return everyone

    def broadcast(self, obj: Any, source: int = 0) -> Any:
        """See :meth:`Communicator.broadcast`."""
        box = [obj]
        dist.broadcast_object_list(box, source, group=self._group, device=torch.device("cpu"))
        return box[0]

    def all_reduce_async(self, tensor: Tensor, op: ReduceOperation = "sum") -> PendingReduction:
        """See :meth:`Communicator.all_reduce_async`."""
        work = dist.all_reduce(tensor, _OPERATIONS[op], group=self._group, async_op=True)
        return PendingReduction(tensor, work, self.world_size if op == "mean" else 1)

    def barrier(self) -> None:
        """See :meth:`Communicator.barrier`."""
        dist.barrier(group=self._group)


def _cpu_group(timeout: float | None) -> Any:
    """Return a group that carries CPU tensors between all ranks."""
    world = dist.group.WORLD
    backends = str(dist.get_backend_config(world))
    if "cpu:" in backends or dist.get_backend(world) != "nccl":
        return world
    limit = None if timeout is None else timedelta(seconds=timeout)
    return dist.new_group(backend="gloo", timeout=limit)


_current: tuple[RankGroup | None, Communicator] | None = None


def current_communicator() -> Communicator:
    """Return the communicator of the group of ranks that exists now.

    Without a group, or with one rank only, it is the null object.

    Returns:
        The same object for as long as the group lives.

    Ranks: the first call after the process group was made must happen on every rank alike (our strategies
    do so at start-up; under another strategy, a callback's ``setup`` is the place). Later calls are free.
    """
    global _current
    group = current_group()
    if _current is None or _current[0] is not group:
        many = group is not None and group.world_size > 1
        _current = (group, TorchCommunicator() if many else SingleProcessCommunicator())
    return _current[1]


def use_communicator(communicator: Communicator, group: RankGroup) -> None:
    """Make ``communicator`` the current one, for ranks that no process group of torch connects.

    Args:
        communicator: How those ranks decide together.
        group: The ranks; the side channel finds its peers by it.

    Ranks: every rank, alike, once they have met; nothing is sent.
    """
    global _current
    use_group(group)
    _current = (group, communicator)


_at_shut_down: list[Callable[[], None]] = []


def at_shut_down(function: Callable[[], None]) -> None:
    """Have ``function`` called once when the current group of ranks is forgotten, the newest first.

    Args:
        function: Lets go of what belongs to the group; it must wait for no rank.
    """
    _at_shut_down.append(function)


def shut_down(timeout: float = 2.0, *, destroy_process_group: bool = False) -> None:
    """Close the side channel of the current communicator and forget the communicator and its group.

    Args:
        timeout: Longest wait of rank 0 for the others to close theirs [s]; 0 after a failure.
        destroy_process_group: Destroy the default process group too. Never do so after a failure.

    Ranks: every rank, at its own end; waits for nobody longer than ``timeout``.
    """
    global _current
    close_side_channel(timeout)
    _current = None
    use_group(None)
    while _at_shut_down:
        _at_shut_down.pop()()
    if destroy_process_group and process_group_exists():
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _at_exit() -> None:
    shut_down()
    wait_for_backend_threads()


at_exit(_at_exit)
