"""Connections between ranks, and how to end a wait on them.

gloo cannot be told to give up: a rank waits in C++ until its peer answers, or the connection breaks. So the connections
between two ranks are shut down, as they are when a process ends; then every wait for that peer raises.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lightning_lockstep._doors.torch_internals import backend_of, stores_of_groups
from lightning_lockstep.distributed.process_group import process_group_exists

__all__ = ["Connection", "abort_devices", "connections", "end_connections", "ports_of", "transferred"]

# Where Linux's ``struct tcp_info`` says how many bytes the other end has acknowledged, and how many have come.
_BYTES_IN_TCP_INFO, _TCP_INFO_LENGTH = struct.Struct("@120xQQ"), 136

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


def transferred(
    without_ports: Collection[int] = (),  # connections with one of them at either end are left out
) -> dict[str, int]:
    """Return how many bytes each TCP connection here has sent and received, where Linux says so."""
    found = {}
    with suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError, ValueError, struct.error):
                name = str(link.readlink())
                if name.startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(link.name))) as one:
                        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_LENGTH)
                        ports = {one.getsockname()[1], one.getpeername()[1]}
                    if not ports & set(without_ports):
                        found[name] = sum(_BYTES_IN_TCP_INFO.unpack(info))
    return found


def end_connections(
    ends: Collection[Connection],
    *,
    hosts: Iterable[str] = (),  # connections with these are shut down too
    kept_ports: Collection[int] = (),  # but for those with one of them at either end
) -> int:
    """Shut down connections of this process, which its peers see end; return how many."""
    addresses, count = set(_addresses(hosts)), 0
    for end, number in connections().items():
        of_such_a_host = end[1].rpartition(":")[0] in addresses and not ports_of(end) & set(kept_ports)
        if end in ends or of_such_a_host:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def ports_of(end: Connection) -> set[int]:
    """Return the ports of both ends of a connection."""
    return {int(address.rpartition(":")[2]) for address in end}


def _addresses(hosts: Iterable[str]) -> Iterator[str]:
    for host in hosts:
        with suppress(OSError):
            yield socket.gethostbyname(host)


def abort_devices() -> None:
    """Abort what nccl does in any process group, which ends every wait for it, and the use of the group."""
    if not process_group_exists():
        return
    for group in stores_of_groups():
        if type(group) is dist.ProcessGroup:
            with suppress(RuntimeError):
                backend_of(group, torch.device("cuda")).abort()


def _text(address: Any) -> str:
    return f"{address.ip.removeprefix('::ffff:')}:{address.port}"
