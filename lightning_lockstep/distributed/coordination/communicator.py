"""What ranks decide together: the communicator, alone and on a process group of torch."""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.distributed.failure.process_exit import at_exit
from lightning_lockstep.distributed.process_group import (
    RankGroup,
    current_group,
    process_group_exists,
    use_group,
    world_of_one,
)
from lightning_lockstep.distributed.side_channel.channel import LocalSideChannel, SideChannel
from lightning_lockstep.distributed.side_channel.opening import close_side_channel, open_side_channel

# -- Collectives that callbacks and strategies use to decide together --
# Control messages travel on the CPU, whatever the device of the model, so that a decision never waits for a
# GPU queue. One process has a communicator too, the null object that answers for a world of one.

ReduceOperation = Literal["sum", "mean", "min", "max"]
_Object = TypeVar("_Object")


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after :meth:`Communicator.agree`: the reasons of those that raised their flags, by rank."""

    reasons: Mapping[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {reason}" for rank, reason in sorted(self.reasons.items()))


class PendingReduction:
    """A reduction that is under way: its result, its handle (``None`` once complete), and a divisor of the result."""

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
    """How the ranks of a run decide together."""

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
        """The channel for messages that must wait for no rank."""
        # The first access waits until rank 0 has made its first; our strategies open the channel at start-up.

    @abstractmethod
    def gather(self, obj: _Object) -> list[_Object]:
        """Return the small picklable object of every rank, in rank order. Ranks: all, together; two collectives."""

    @abstractmethod
    def broadcast(self, obj: _Object, source: int = 0) -> _Object:
        """Return the small picklable object of rank ``source``. Ranks: all, together; two collectives."""

    @abstractmethod
    def all_reduce_async(self, tensor: Tensor, op: ReduceOperation = "sum") -> PendingReduction:
        """Start to reduce a CPU tensor in place; its handle's ``wait()`` gives it. Ranks: all, in the same order."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has arrived here. Ranks: all, together."""

    def pass_on(self, data: bytes) -> bytes:
        """Give bytes to the next rank, the last one to rank 0, and return those of the one before. Ranks: all."""
        return self.gather(data)[self.rank - 1]

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum") -> Tensor:
        """Reduce a CPU tensor over all ranks, in place, and return it. Ranks: all, together; one all-reduce."""
        return self.all_reduce_async(tensor, op).wait()

    def agree(self, flag: bool, reason: str = "") -> Agreement:
        """Find out whether any rank raises its flag, and why. Ranks: all, together; 4 bytes, a gather if one is up."""
        # This is how an error on one rank becomes a decision of all: raise or branch on the answer, never on one's own
        # flag.
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

    def gather(self, obj: _Object) -> list[_Object]:
        """See :meth:`Communicator.gather`."""
        return [obj]

    def broadcast(self, obj: _Object, source: int = 0) -> _Object:
        """See :meth:`Communicator.broadcast`."""
        return obj

    def all_reduce_async(self, tensor: Tensor, op: ReduceOperation = "sum") -> PendingReduction:
        """See :meth:`Communicator.all_reduce_async`."""
        return PendingReduction(tensor, None)

    def barrier(self) -> None:
        """See :meth:`Communicator.barrier`."""


# -- Threads of torch's backends that still hold something of the last operation when Python ends --

#: What torch calls the threads in which gloo runs its operations, cut to the length that Linux keeps.
_NAMES = frozenset({"pt_gloo_runloop"})
_PAUSE = 0.001
_LOOKS = 2


def wait_for_backend_threads(timeout: float = 2.0) -> bool:
    """Wait, up to ``timeout`` [s], until no thread of gloo is at work here; return whether none is."""
    # Such a thread lets go of the tensors of an operation a moment after it has said that the operation is
    # done. Where Python ends in this moment, the thread cannot get Python's lock to do so, is ended in the
    # middle, and C++ answers with an abort: "terminate called without an active exception", and exit code 134
    # of a rank that has done its work. Seen with torch 2.13 (``ProcessGroupGloo::runLoop``). Threads that
    # wait, for work or for another rank, are at rest.
    deadline = time.monotonic() + timeout
    at_rest = 0
    while at_rest < _LOOKS:
        time.sleep(_PAUSE)  # Python's lock is free meanwhile, for whoever waits for it
        at_rest = 0 if any(state != "S" for state in _states()) else at_rest + 1
        if time.monotonic() > deadline:
            return False
    return True  # also where there is no /proc


def _states() -> Iterator[str]:
    """Yield the state of each such thread: ``S`` where it sleeps."""
    for folder in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # a thread that has just ended
            head, _, tail = (folder / "stat").read_text().rpartition(")")
            if head.partition("(")[2] in _NAMES:
                yield tail.split()[0]


# -- The communicator of a process group of ``torch.distributed``, and which communicator is the current one

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no average; divided afterwards
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class TorchCommunicator(Communicator):
    """The communicator of the default process group of torch. Ranks: all, together, to make it."""

    # Where that group cannot carry CPU tensors (nccl), an additional gloo group does. `control_timeout`: longest wait
    # for another rank in a control message [s].

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

    def gather(self, obj: _Object) -> list[_Object]:
        """See :meth:`Communicator.gather`."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, obj, group=self._group)
        return everyone

    def broadcast(self, obj: _Object, source: int = 0) -> _Object:
        """See :meth:`Communicator.broadcast`."""
        box = [obj]
        dist.broadcast_object_list(box, source, group=self._group, device=torch.device("cpu"))
        return box[0]

    def pass_on(self, data: bytes) -> bytes:
        """See :meth:`Communicator.pass_on`."""
        lengths = self.gather(len(data))
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        sent, expected = [0] * self.world_size, [0] * self.world_size
        sent[after], expected[before] = lengths[self.rank], lengths[before]
        coming, own = (torch.empty(n, dtype=torch.uint8, device="cpu") for n in (lengths[before], len(data)))
        own.numpy()[:] = memoryview(data)
        dist.all_to_all_single(coming, own, expected, sent, group=self._group)
        return coming.numpy().tobytes()

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
    """Return the communicator of the group of ranks that exists now, the same object as long as the group lives."""
    # The first call after the process group was made must happen on every rank: our strategies make it at start-up;
    # under another strategy a callback's `setup` is the place. Later calls are free.
    global _current
    group = current_group()
    if _current is None or _current[0] is not group:
        many = group is not None and group.world_size > 1
        _current = (group, TorchCommunicator() if many else SingleProcessCommunicator())
    return _current[1]


def use_communicator(communicator: Communicator, group: RankGroup) -> None:
    """Make ``communicator`` the current one, for ranks that no process group of torch connects. Ranks: every rank."""
    global _current
    use_group(group)
    _current = (group, communicator)


@contextmanager
def alone() -> Iterator[None]:
    """Let this process in the body be a run of one rank; the ranks stay connected. Ranks: any, alone."""
    global _current
    before = _current
    with world_of_one():
        try:
            yield
        finally:
            _current = before


_at_shut_down: list[Callable[[], None]] = []


def at_shut_down(function: Callable[[], None]) -> None:
    """Call ``function``, which must wait for no rank, when the group of ranks is forgotten; the newest first."""
    _at_shut_down.append(function)


def shut_down(timeout: float = 2.0, *, destroy_process_group: bool = False) -> None:
    """Close the side channel, and forget the communicator and its group. Ranks: every rank, at its end."""
    # `timeout`: longest wait of rank 0 for the others to close theirs [s]; 0 after a failure, when the process group
    # must not be destroyed either.
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
