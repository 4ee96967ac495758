"""How the ranks of an MPI job find each other, without a fixed port and without a list of addresses.

Rank 0 listens on a port that the system gives it. Over MPI it sends the others that port and all its addresses, and
each answers which of them it can reach.
"""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

from lightning_lockstep.distributed.mpi.backend import check_ranks, start_runtime
from lightning_lockstep.distributed.process_group import host_rendezvous
from lightning_lockstep.distributed.rendezvous import address_towards, addresses_here
from lightning_lockstep.errors import LaunchError

_REACH = 3.0  # longest wait for an address to answer [s]


@dataclass(frozen=True)
class MPIRendezvous:
    """Where the ranks meet."""

    address: str  # of rank 0, reached by every rank
    port: int
    sharing: int | None = None  # ranks of this node on the same cores, this one included; None: not known


@functools.cache
def agree_on_rendezvous(rank: int, size: int) -> MPIRendezvous:
    """Return where the ranks of this MPI job meet; the first time, all of them call it together."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if address and port.isdigit():
        return MPIRendezvous(address, int(port))
    if size == 1:
        return MPIRendezvous("127.0.0.1", host_rendezvous("127.0.0.1"))
    runtime = start_runtime()
    check_ranks(runtime, rank, range(size))
    world, call = runtime.MPI.COMM_WORLD, runtime.worker.call
    host, cores = socket.gethostname(), os.sched_getaffinity(0)
    everyone: list[tuple[str, set[int]]] = call(world.allgather, (host, cores))
    one_host = all(name == host for name, _ in everyone)
    offer = None
    if rank == 0:
        addresses = ["127.0.0.1"] if one_host else _addresses()
        offer = addresses, host_rendezvous(addresses[0], everywhere=len(addresses) > 1)
    addresses, port = call(world.bcast, offer)
    reached = [address for address in addresses if one_host or rank == 0 or _reaches(address, port)]
    by_all = set.intersection(*map(set, call(world.allgather, reached)))
    address = next((address for address in addresses if address in by_all), None)
    if address is None:
        raise LaunchError(
            f"Rank 0 runs on {everyone[0][0]} and listens on port {port} at {', '.join(addresses)}, but none of these"
            " addresses can be reached from every rank. Let the hosts of the job reach each other on all ports above"
            " 1024, or set MASTER_ADDR and MASTER_PORT to an address and a port that they can reach."
        )
    if not one_host:
        _choose_gloo_interface(address)
    return MPIRendezvous(address, port, sum(name == host and bool(own & cores) for name, own in everyone))


def _addresses() -> list[str]:
    """Return the addresses of this host that others may reach, those of IPv4 first."""
    usable = [one for one in map(ip_address, addresses_here()) if not (one.is_loopback or one.is_link_local)]
    return [str(one) for one in sorted(usable, key=lambda one: one.version)] or ["127.0.0.1"]


def _reaches(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_REACH):
            return True
    except OSError:
        return False


def _choose_gloo_interface(address: str) -> None:
    """Give gloo the interface that leads to rank 0; by default it takes the one its host name resolves to."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    own = address_towards(address)
    own = address if own.startswith("127.") else own
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == own for one in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
