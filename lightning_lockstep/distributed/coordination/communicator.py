"""What ranks do together: the communicator, which is the current one, how it ends, and ranks one after the other."""

from __future__ import annotations

import atexit
import itertools
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep._settings import Faults
from lightning_lockstep.distributed.process_group import (
    RankGroup,
    current_group,
    forget_group,
    process_group_exists,
)
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.distributed.side_channel.gather import Gather
from lightning_lockstep.distributed.side_channel.opening import close_side_channel, open_side_channel
from lightning_lockstep.errors import ConfigurationError, RankFailedError

_Object = TypeVar("_Object")


class Communicator:
    """How the ranks of a run decide together; a process without others decides alone."""

    # Control messages travel on the CPU, whatever the model's device, so that a decision never waits for a GPU's queue.

    def __init__(self, ranks: RankGroup | None = None) -> None:
        self.host = socket.gethostname()
        self.rank, self.world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
        self._store = None if ranks is None else ranks.store
        self._group: Any = None  # that of torch
        self._side_channel: SideChannel | None = SideChannel() if self.world_size == 1 else None
        if self.world_size > 1 and "cpu:" not in str(dist.get_backend_config()):
            self._group = dist.new_group(backend="gloo")  # which carries CPU tensors

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def side_channel(self) -> SideChannel:
        """The channel for messages that must wait for no rank."""
        # The first access waits until rank 0 has made its first; our strategies open the channel at start-up.
        if self._side_channel is None:
            self._side_channel = open_side_channel()
        return self._side_channel

    def gather(self, obj: _Object) -> list[_Object]:
        """Return the small picklable object of every rank, in rank order. Ranks: all, together; two collectives."""
        everyone: list[Any] = [obj] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(everyone, obj, group=self._group)
        return everyone

    def broadcast(self, obj: _Object, source: int = 0) -> _Object:
        """Return the small picklable object of rank ``source``. Ranks: all, together; two collectives."""
        box = [obj]
        if self.world_size > 1:
            dist.broadcast_object_list(box, source, group=self._group, device=torch.device("cpu"))
        return box[0]

    def pass_on(self, data: bytes) -> bytes:
        """Give bytes to the next rank, the last one to rank 0, and return those of the one before. Ranks: all."""
        if self.world_size == 1:
            return data
        lengths = self.gather(len(data))
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        sent, expected = [0] * self.world_size, [0] * self.world_size
        sent[after], expected[before] = lengths[self.rank], lengths[before]
        coming, own = (torch.empty(n, dtype=torch.uint8, device="cpu") for n in (lengths[before], len(data)))
        own.numpy()[:] = memoryview(data)
        dist.all_to_all_single(coming, own, expected, sent, group=self._group)
        return coming.numpy().tobytes()

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "min", "max"] = "sum") -> Tensor:
        """Reduce a CPU tensor over all ranks, in place, and return it. Ranks: all, together; one all-reduce."""
        if self.world_size > 1:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=self._group)
        return tensor

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum up a CPU tensor in place; return what waits for the sum. Ranks: all, in the same order."""
        if self.world_size == 1:
            return lambda: tensor
        work = dist.all_reduce(tensor, group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return tensor

        return wait

    def count(self, name: str, amount: int = 1) -> int:
        """Add to a number that all ranks share, and return it. Ranks: any, alone; a request to the store."""
        return amount or 1 if self._store is None else self._store.add(f"lockstep/{name}", amount)

    def barrier(self) -> None:
        """Wait until every rank has arrived here. Ranks: all, together."""
        if self.world_size > 1:
            dist.barrier(group=self._group)

    def agree(self, flag: bool, reason: str = "") -> dict[int, str]:
        """Return the reasons of the ranks whose flags are up. Ranks: all, together; 4 bytes, a gather if one is."""
        # So an error on one rank becomes a decision of all: raise or branch on the answer, never on one's own flag.
        if not int(self.all_reduce(torch.tensor(int(flag), dtype=torch.int32), "max")):
            return {}
        reasons = enumerate(self.gather(reason if flag else None))
        return {rank: text for rank, text in reasons if text is not None}

    def agreed(self, work: Callable[[], _Object]) -> _Object:
        """Return the result here, or raise on all ranks the ConfigurationError that the work raises on some."""
        faults: tuple[str, ...] = ()
        try:
            result = work()
        except ConfigurationError as error:
            faults = error.faults
        if failed := self.agree(bool(faults), "\n".join(faults)):
            if len(failed) == self.world_size and len(set(failed.values())) == 1:
                raise ConfigurationError(faults)
            raise ConfigurationError([f"rank {rank}: {text}" for rank, text in failed.items()])
        return result


# -- Which communicator is the current one, and how it ends --

_without_group: Communicator | None = None


def current_communicator() -> Communicator:
    """Return the communicator of the group of ranks that exists now, the same object as long as the group lives."""
    # Every rank must make the first call after the process group was made: our strategies do so at start-up; under
    # another strategy make it in a callback's `setup`. Later calls cost nothing.
    global _without_group
    group = current_group()
    if group is None:
        _without_group = _without_group or Communicator()
        return _without_group
    if group.communicator is None:
        group.communicator = Communicator(group)
    return group.communicator  # type: ignore[no-any-return]


_at_shut_down: list[Callable[[], None]] = []


def at_shut_down(function: Callable[[], None]) -> None:
    """Call ``function``, which must wait for no rank, when the group of ranks is forgotten; the newest first."""
    _at_shut_down.append(function)


def shut_down(timeout: float = 2.0, *, destroy_process_group: bool = False) -> None:
    """Close the side channel, and forget the communicator and its group. Ranks: every rank, at its end."""
    # `timeout`: how long rank 0 waits for the others to close theirs [s]. After a failure it must be 0, and the process
    # group must not be destroyed.
    global _without_group
    close_side_channel(timeout)
    _without_group = None
    forget_group()
    while _at_shut_down:
        _at_shut_down.pop()()
    if destroy_process_group and process_group_exists():
        with suppress(RuntimeError):
            dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Have torch forget the device meshes of groups that are destroyed: DTensor takes an equal new mesh for them."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return
    propagator = tensors.DTensor._op_dispatcher.sharding_propagator
    kind = type(propagator.propagate_op_sharding)
    propagator.propagate_op_sharding = kind(propagator.propagate_op_sharding_non_cached)
    # Torch 2.9 has no such cache in C++.
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", bool)()


def _at_exit() -> None:
    shut_down()
    # A thread of gloo frees the tensors of an operation a moment after the operation is done, and needs Python's lock
    # for it: if Python has ended by then, the process aborts with exit code 134 (torch 2.13).
    deadline, at_rest = time.monotonic() + _GLOO_RESTS_WITHIN, 0
    while at_rest < 2 and time.monotonic() < deadline:
        time.sleep(0.001)  # Python's lock is free meanwhile, for whoever waits for it
        at_rest = 0 if _gloo_is_at_work() else at_rest + 1


_GLOO_RESTS_WITHIN = 2.0  # [s]


def _gloo_is_at_work() -> bool:
    """Return whether a thread of gloo runs; one that waits, for work or for another rank, sleeps."""
    for folder in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # a thread that has just ended
            head, _, tail = (folder / "stat").read_text().rpartition(")")
            if head.endswith("(pt_gloo_runloop") and tail.split()[0] != "S":
                return True
    return False


atexit.register(_at_exit)


# -- Code that must run on one rank after the other: a download, a compile cache, a file that all append to --


@contextmanager
def in_rank_order(*, per_node: bool = False, timeout: float = 1800.0) -> Iterator[int]:
    """Run the body on one rank after the other; all ranks leave together.

    When the body raises on a rank, that rank keeps its error, the other ranks raise a :class:`RankFailedError`
    that carries it, and the ranks after it skip the body.

    Args:
        per_node: Let one rank of each host run at a time, not one of all; for what is done once on each host's disk.
        timeout: Longest time that the others wait for one rank to arrive and run the body [s].

    Yields:
        This rank's number.

    Raises:
        ConfigurationError: ``timeout`` is no duration.
        RankFailedError: The body failed on another rank.
        CollectiveStallError: A rank did not arrive, or is still in the body; it is named.

    Ranks: all, together, though not at the same time; 2 messages for each rank and turn over the side channel and no
    collective. Without a process group the body just runs.
    """
    faults = Faults()
    faults.number("timeout", timeout, what="seconds", above=0, such_as=1800)
    faults.raise_all()
    communicator = current_communicator()
    if communicator.world_size == 1:
        yield communicator.rank
        return
    gather, blocks = communicator.side_channel.get_or_create(_blocks)
    gather.timeout, block = timeout, next(blocks)

    def barrier(turn: int, text: str = "") -> list[str]:
        """Return what every rank says at the end of a turn."""
        return gather.collect(f"{block}/{turn}", text).complete("The end of a turn in in_rank_order()")

    nodes = barrier(-1, communicator.host if per_node else "")
    turn_of = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    for turn in range(max(turn_of) + 1):
        if turn == turn_of[communicator.rank]:
            try:
                yield communicator.rank
            except BaseException as error:
                # The others hear of it at the end of this turn; this rank does not wait for them.
                gather.post(f"{block}/{turn}", "".join(traceback.format_exception(error)))
                raise
        for rank, text in enumerate(barrier(turn)):
            if text:
                last = text.rstrip().splitlines()[-1]
                raise RankFailedError(f"rank {rank} failed in in_rank_order(): {last}\n\n{text.rstrip()}")


def _blocks(channel: SideChannel) -> tuple[Gather, Iterator[int]]:
    """Return what gathers the words of all ranks at the end of a turn, and the numbers of the blocks."""
    return Gather(channel, "in_rank_order"), itertools.count()
