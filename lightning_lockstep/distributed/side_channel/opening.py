"""How the ranks find the side channel: its address stands in the store of the process group.

So opening it is no collective. Rank 0 makes the channel's store and writes the address down; any other rank
reads it there when it first needs it. Where a process group has no store (some MPI backends), the ranks fall
back to a broadcast, which all must then enter together.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_lockstep.distributed.failure.process_exit import at_process_end
from lightning_lockstep.distributed.side_channel.base import SideChannel
from lightning_lockstep.distributed.side_channel.store import StoreSideChannel

__all__ = ["close_side_channel", "current_group", "known_rank", "open_side_channel", "side_channel_if_open"]

_KEY = "lockstep/side_channel"
_AVAILABLE = dist.is_available()
_lock = threading.Lock()
_open: tuple[Any, SideChannel] | None = None


def known_rank() -> tuple[int, int] | None:
    """Return (rank, world size) of the process group that exists now, or ``None`` without one.

    Ranks: any rank, alone; nothing is sent and nothing is made.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def current_group() -> object | None:
    """Return what stands for the process group that exists now; another object once there is another.

    Ranks: any rank, alone; one attribute read.
    """
    return dist.group.WORLD if _AVAILABLE else None


def side_channel_if_open(*, open_if_easy: bool = False) -> SideChannel | None:
    """Return the side channel of the current process group if there is one, without waiting for a rank.

    Args:
        open_if_easy: Open it where that needs nobody: on rank 0, and on a rank that finds the address.

    Ranks: any rank, alone; with ``open_if_easy`` a round trip to the store, and a few milliseconds once.
    """
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        return None
    if _open is not None and _open[0] is group:
        return _open[1]
    store = _default_store()
    if not open_if_easy or store is None or dist.get_world_size() < 2:
        return None
    if dist.get_rank() != 0 and not store.check([_KEY]):
        return None
    return open_side_channel()


def open_side_channel(
    *,
    timeout: float = 60.0,
    broadcast: Callable[[Any], Any] | None = None,
) -> SideChannel:
    """Return the side channel of the current process group, opened on the first call.

    Args:
        timeout: Longest wait for rank 0 to write the address down [s].
        broadcast: Gives rank 0's object to all, for process groups without a store.

    Ranks: any rank; rank 0 waits for nobody, the others until rank 0 has called it too.
    """
    global _open
    group = dist.group.WORLD
    with _lock:
        if _open is not None and _open[0] is group:
            return _open[1]
        rank, world_size = dist.get_rank(), dist.get_world_size()
        server = None
        if rank == 0:
            # Port 0 lets the system choose, so that jobs on one host never collide.
            server = dist.TCPStore("0.0.0.0", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        mine = (os.environ.get("MASTER_ADDR") or socket.gethostname(), server.port if server else 0)
        host, port = _address(mine, rank, timeout, broadcast)
        channel = StoreSideChannel(
            "127.0.0.1" if server else host, port, rank=rank, world_size=world_size, server=server
        )
        _open = (group, channel)
        if multiprocessing.parent_process() is not None:
            at_process_end(close_side_channel)
        return channel


def close_side_channel(timeout: float = 2.0) -> None:
    """Close the side channel that is open, if any; see :meth:`SideChannel.close`.

    Ranks: every rank, at its own end.
    """
    global _open
    if _open is not None:
        _open[1].close(timeout)
    _open = None


def _address(
    mine: tuple[str, int], rank: int, timeout: float, broadcast: Callable[[Any], Any] | None
) -> tuple[str, int]:
    store = _default_store()
    if store is None:
        if broadcast is None:
            raise RuntimeError(
                "This process group has no store, so the side channel can only be opened together."
            )
        host, port = broadcast(mine)
        return host, port
    if rank == 0:
        store.set(_KEY, f"{mine[0]}|{mine[1]}")
        return mine
    store.wait([_KEY], timedelta(seconds=timeout))
    host, _, port = bytes(store.get(_KEY)).decode().rpartition("|")
    return host, int(port)


def _default_store() -> Any | None:
    # The store of the default group has no public accessor in torch 2.9 to 2.13.
    with suppress(RuntimeError, ValueError, AttributeError, AssertionError):
        return dist.distributed_c10d._get_default_store()
    return None
