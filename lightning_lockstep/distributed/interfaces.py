"""Which of its addresses a rank listens at: the one that the other ranks use, and no other."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address

__all__ = [
    "ANY",
    "address_towards",
    "addresses_here",
    "addresses_of",
    "host_of",
    "listening_address",
    "on_one_host",
    "own_address",
]

#: Every address of this host.
ANY = "0.0.0.0"
_LOOPBACK = ("127.0.0.1", "127.0.1.1", "::1")


def own_address(name: str) -> str:
    """Return the address of this host to give to ranks that know it by ``name``."""
    if on_one_host():
        return "127.0.0.1"
    found = addresses_of(name)
    if _means_this_host(name):  # whoever can reach rank 0 by this is on its host
        return next(iter(found), "127.0.0.1")
    return next(iter(_reachable(found)), ANY)  # none is that others could use: 127.0.1.1, address translation


def listening_address(name: str) -> str:
    """Return the address at which this host has to listen so that ranks find it by ``name`` itself."""
    found = addresses_of(name)
    if on_one_host() or _means_this_host(name):
        return next((address for address in found if _is_own(address)), ANY)
    reachable = _reachable(found)
    return reachable[0] if len(reachable) == 1 == len(found) else ANY  # others may take another one


# Variables with the number of ranks on this host and of the job: torchrun, Open MPI, MPICH.
_SIZES = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)


def on_one_host() -> bool:
    """Return whether the program that started this rank says that all ranks of the job are on this host."""
    environ = os.environ  # so that every rank gets the same answer
    if any(environ.get(here, "") == environ.get(everywhere, " ") for here, everywhere in _SIZES):
        return True
    return "SLURM_PROCID" in environ and environ.get("SLURM_STEP_NUM_NODES") == "1"


def _means_this_host(name: str) -> bool:
    return name in (*_LOOPBACK, "localhost")


def _reachable(addresses: list[str]) -> list[str]:
    """Return those of this host's addresses that another host could use, those of IPv4 first."""
    own = [address for address in addresses if address not in _LOOPBACK and _is_own(address)]
    return sorted(own, key=lambda address: ":" in address)


def address_towards(host: str) -> str:
    """Return the address of this host from which it reaches ``host``."""
    for address in addresses_of(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # a datagram socket: the route is looked up, no packet leaves
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def host_of(address: str) -> str:
    """Return the host in an address such as ``tcp://10.0.0.1:4000`` or ``tcp://[fe80::1]:4000``."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def addresses_here() -> set[str]:
    """Return the addresses of all interfaces of this host, loopback included."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    listed = (address for addresses in psutil.net_if_addrs().values() for address in addresses)
    return {address.address.partition("%")[0] for address in listed if address.family in families}


def addresses_of(name: str) -> list[str]:
    """Return the addresses that a host name stands for here; none where it stands for nothing."""
    with suppress(ValueError):
        return [str(ip_address(name.strip("[]")))]
    with suppress(OSError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)  # may ask a name server
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return []


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family) as probe:
        probe.bind((address, 0))
        return True
    return False
