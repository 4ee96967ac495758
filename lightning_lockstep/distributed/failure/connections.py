"""Connections between ranks, and how to end a wait on them.

gloo cannot be told to give up: a rank waits in C++ until its peer answers, or the connection breaks. So the connections
between two ranks are shut down, as they are when a process ends; then every wait for that peer raises.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lightning_lockstep.distributed.process_group import process_group_exists

#: This end's address and port, and the other end's, as texts such as ``10.0.0.1:4000``.
Connection = tuple[str, str]


def connections(pid: int | None = None) -> dict[Connection, int]:
    """Return the TCP connections of a process of this host, by default this one, with their descriptors."""
    with suppress(psutil.Error):
        return {
            (_text(one.laddr), _text(one.raddr)): one.fd
            for one in psutil.Process(pid).net_connections("tcp")
            if one.status == psutil.CONN_ESTABLISHED
        }
    return {}


def end_connections(ends: Collection[Connection]) -> None:
    """Shut down connections of this process, named from either end; its peers see that they end."""
    for (here, there), number in connections().items():
        if (here, there) in ends or (there, here) in ends:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def abort_devices() -> None:
    """Abort what nccl does in any process group, which ends every wait for it, and the use of the group."""
    if not process_group_exists():
        return
    # Torch has no public list of the process groups. A copy: the main thread may be making one.
    for group in list(dist.distributed_c10d._world.pg_map):
        if type(group) is dist.ProcessGroup:
            with suppress(RuntimeError):
                backend: Any = group._get_backend(torch.device("cuda"))
                backend.abort()


def _text(address: Any) -> str:
    return f"{address.ip.removeprefix('::ffff:')}:{address.port}"
