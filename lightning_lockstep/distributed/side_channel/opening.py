"""How the ranks find the side channel: its address is a key in the store of their group.

So opening it is no collective. Rank 0 makes the channel's store and sets the key; any other rank reads it
when it first needs the channel. Where a group has no store (some MPI backends), the ranks use a broadcast
instead, which all must then enter together.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from lightning_lockstep.distributed.failure.process_exit import at_process_end
from lightning_lockstep.distributed.process_group import RankGroup, current_group
from lightning_lockstep.distributed.side_channel.base import SideChannel
from lightning_lockstep.distributed.side_channel.store import StoreSideChannel

__all__ = ["close_side_channel", "current_group", "known_rank", "open_side_channel", "side_channel_if_open"]

_KEY = "lockstep/side_channel"
_lock = threading.Lock()
_open: tuple[RankGroup, SideChannel] | None = None


def known_rank() -> tuple[int, int] | None:
    """Return (rank, world size) of the group that exists now, or ``None`` without one.

    Ranks: any rank, alone; nothing is sent and nothing is made.
    """
    group = current_group()
    return None if group is None else (group.rank, group.world_size)


def side_channel_if_open(*, open_if_easy: bool = False) -> SideChannel | None:
    """Return the side channel of the current group if there is one, without waiting for a rank.

    Args:
        open_if_easy: Open it where that needs nobody: on rank 0, and on a rank that finds the address.

    Ranks: any rank, alone; with ``open_if_easy`` a round trip to the store, and a few milliseconds once.
    """
    group = current_group()
    if group is None:
        return None
    if _open is not None and _open[0] is group:
        return _open[1]
    if not open_if_easy or group.store is None or group.world_size < 2:
        return None
    if group.rank != 0 and not group.store.check([_KEY]):
        return None
    return open_side_channel()


def open_side_channel(
    *,
    timeout: float = 60.0,
    broadcast: Callable[[Any], Any] | None = None,
) -> SideChannel:
    """Return the side channel of the current group, opened on the first call.

    Args:
        timeout: Longest wait for rank 0 to set the address [s].
        broadcast: Gives rank 0's object to all, for groups without a store.

    Ranks: any rank; rank 0 waits for nobody, the others until rank 0 has called it too.
    """
    global _open
    group = current_group()
    if group is None:
        raise RuntimeError("The side channel connects a group of ranks, and there is none yet.")
    with _lock:
        if _open is not None and _open[0] is group:
            return _open[1]
        server = None
        if group.rank == 0:
            # Port 0 lets the system choose, so that jobs on one host never collide.
            server = TCPStore("0.0.0.0", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        mine = (os.environ.get("MASTER_ADDR") or socket.gethostname(), server.port if server else 0)
        host, port = _address(group, mine, timeout, broadcast)
        channel = StoreSideChannel(
            "127.0.0.1" if server else host,
            port,
            rank=group.rank,
            world_size=group.world_size,
            server=server,
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
    group: RankGroup, mine: tuple[str, int], timeout: float, broadcast: Callable[[Any], Any] | None
) -> tuple[str, int]:
    if group.store is None:
        if broadcast is None:
            raise RuntimeError(
                "This group of ranks has no store, so the side channel can only be opened together."
            )
        host, port = broadcast(mine)
        return host, port
    if group.rank == 0:
        group.store.set(_KEY, f"{mine[0]}|{mine[1]}")
        return mine
    group.store.wait([_KEY], timedelta(seconds=timeout))
    host, _, port = bytes(group.store.get(_KEY)).decode().rpartition("|")
    return host, int(port)
