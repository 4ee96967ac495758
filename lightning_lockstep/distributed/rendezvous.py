"""The store at which the ranks of a job first meet."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore

from lightning_lockstep.errors import LaunchError

__all__ = ["forget_rendezvous", "free_port", "host_rendezvous", "rendezvous_store"]

_stores: dict[tuple[str, int], TCPStore] = {}


def rendezvous_store(
    rank: int,
    world_size: int,
    *,
    address: str | None = None,
    port: int | None = None,
    timeout: float = 300.0,
) -> Store:
    """Return the store at which all ranks of this job can meet before any process group exists.

    There is one for each address, made when first asked for. Rank 0 hosts it, but under ``torchrun``, whose
    agent already does.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        address: Host name or address of rank 0; by default ``MASTER_ADDR``.
        port: Its port; by default ``MASTER_PORT``.
        timeout: Longest wait for rank 0 to answer, and for a key to be set [s].

    Returns:
        The store. The process group of a strategy is built on the same one.

    Raises:
        LaunchError: No address or port is known.

    Ranks: any rank; all but the one that hosts it wait for that one to answer.
    """
    address = address or os.environ.get("MASTER_ADDR")
    port = port or int(os.environ.get("MASTER_PORT", 0))
    if not address or not port:
        raise LaunchError(
            f"Rank {rank} of {world_size} does not know where the ranks shall meet: MASTER_ADDR is {address!r} and"
            f" MASTER_PORT is {port or None!r}. The program that starts the ranks must set both to the host of"
            " rank 0 and to a free port on it."
        )
    if (address, port) not in _stores:
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        _stores[address, port] = TCPStore(
            address,
            port,
            world_size,
            rank == 0 and not by_agent,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    return _stores[address, port]


def host_rendezvous(address: str) -> int:
    """Listen at ``address`` on a port that the system chooses, and return that port.

    Args:
        address: Address of this host at which the other ranks will look.

    Ranks: rank 0, before it starts the others.
    """
    # The store listens on every address of the host, so one that it made is found again by the port.
    store = TCPStore(
        address, 0, None, True, timedelta(seconds=300), wait_for_workers=False, multi_tenant=True
    )
    _stores[address, store.port] = store
    return int(store.port)


def free_port() -> int:
    """Return a port of this host that nobody uses now.

    Between the answer and its use another program can take it; prefer :func:`host_rendezvous`, which keeps
    what it was given.

    Ranks: the process that starts the ranks.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def forget_rendezvous() -> None:
    """Drop every store made so far, so that the next job of this process meets anew.

    Ranks: any rank, alone, once no process group that was built on the store is left.
    """
    _stores.clear()
