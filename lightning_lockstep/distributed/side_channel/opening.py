"""How the ranks find the side channel: its address is a key in the store of their group.

So opening it is no collective. Rank 0 begins to listen and sets the key; the others read it when they first need it.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.util
import os
import socket
import threading
from functools import partial

from torch.distributed import DistError

from lightning_lockstep._settings import JOB_TOKEN
from lightning_lockstep._text import first_line
from lightning_lockstep.distributed.process_group import RankGroup, current_group
from lightning_lockstep.distributed.rendezvous import (
    ANY,
    address_towards,
    channel_keys,
    fingerprint,
    known_job_token,
    new_job_token,
    own_address,
)
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.distributed.side_channel.zeromq import ZeroMQSideChannel
from lightning_lockstep.errors import LaunchError

_KEY = "lockstep/side_channel"
# How long a connection to rank 0 may take once its address is known [s].
_CONNECT_FOR = 60.0
# For how long a rank may be silent before it is lost, if no strategy has set it [s].
_SILENCE_LIMIT = 120.0
_lock = threading.Lock()
_open: tuple[RankGroup, SideChannel] | None = None


def side_channel_if_open(*, open_if_easy: bool = False) -> SideChannel | None:
    """Return the side channel of the current group if there is one, without waiting for a rank."""
    # ``open_if_easy``: open it if that waits for no rank: on rank 0, and on a rank that finds the address.
    group = current_group()
    if group is None:
        return None
    if _open is not None and _open[0] is group:
        return _open[1]
    is_easy = open_if_easy and group.world_size > 1 and (group.rank == 0 or group.store.check([_KEY]))
    return open_side_channel() if is_easy else None


def open_side_channel() -> SideChannel:
    """Return the side channel of the current group, opened on the first call."""
    # Rank 0 waits for nobody, the others until rank 0 has called it too.
    global _open
    group = current_group()
    if group is None:
        raise RuntimeError("The side channel connects a group of ranks, and there is none yet.")
    with _lock:
        if _open is not None:
            if _open[0] is group:
                return _open[1]
            _open[1].close(0.0)  # of a group that is no more
        channel = open_on(group)
        _open = (group, channel)
        if multiprocessing.parent_process() is not None:
            # A process of multiprocessing runs no functions of atexit up to Python 3.12, but its finalizers.
            multiprocessing.util.Finalize(None, close_side_channel, exitpriority=100)
        return channel


def close_side_channel(timeout: float = 2.0) -> None:
    """Close the side channel that is open, if any; see :meth:`SideChannel.close`."""
    global _open
    if _open is not None:
        _open[1].close(timeout)
    _open = None


def open_on(group: RankGroup) -> ZeroMQSideChannel:
    """Return a side channel of a group, whichever the current one is. Ranks: each waits for rank 0."""
    token = known_job_token()
    limit = _SILENCE_LIMIT if group.options is None else group.options[1]
    opened = partial(ZeroMQSideChannel, group.rank, group.world_size, silence_limit=limit)
    if group.rank == 0:
        made = token or new_job_token()
        name = os.environ.get("MASTER_ADDR") or socket.gethostname()
        if int(os.environ.get("NODE_RANK", 0)):  # all ranks on the host of the store are lost
            name = address_towards(name)
        host = own_address(name)
        channel = opened(host=host, known_as=name if host == ANY else None, keys=channel_keys(made))
        # A token that came with the environment is known to all ranks and stays out of the store.
        offer = [channel.address, None if token else made, fingerprint(made)]
        group.store.set(_KEY, json.dumps(offer))
        return channel
    try:
        address, given, print_of_main = json.loads(group.store.get(_KEY))
    except DistError as error:
        raise LaunchError(
            f"Rank 0 has not opened the side channel: look at what it printed. Torch said: {first_line(error)}"
        ) from error
    if fingerprint(given or token or "") != print_of_main:
        raise LaunchError(
            f"Rank {group.rank} of {group.world_size} has another {JOB_TOKEN} than rank 0, or none. Give every rank of"
            " the job the same, or none, and every job a different MASTER_PORT."
        )
    channel = opened(keys=channel_keys(given or token or ""), main_address=address)
    if not channel.wait_for(lambda: channel.answers(0), _CONNECT_FOR):
        channel.close(0.0)
        raise LaunchError(
            f"Rank {group.rank} of {group.world_size} could not connect to the side channel of rank 0 at {address}"
            f" within {_CONNECT_FOR:.0f} s. Let TCP connections between the ranks' hosts through (any port)."
        )
    return channel
