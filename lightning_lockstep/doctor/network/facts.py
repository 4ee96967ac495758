"""What the agent of a rank tells about its host: names, addresses, interfaces, shared memory, peer-to-peer copies."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

__all__ = ["addresses_of_name", "host_facts", "interface_towards", "interfaces"]

_HOSTS = Path("/etc/hosts")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface that is up, loopback included."""
    import psutil

    status = psutil.net_if_stats()
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        own = [
            one.address.partition("%")[0]
            for one in addresses
            if one.family in (socket.AF_INET, socket.AF_INET6)
        ]
        if own and name in status and status[name].isup:
            found[name] = own
    return found


def addresses_of_name(name: str) -> list[str]:
    """Return the addresses that a host name stands for on this host; none where it stands for nothing.

    Args:
        name: Host name.
    """
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return []


def interface_towards(address: str) -> tuple[str, str]:
    """Return the interface from which this host reaches another, and its own address there.

    Args:
        address: Address of the other.
    """
    own = ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # a datagram socket: the route is looked up, no packet leaves
        own = str(probe.getsockname()[0])
    name = next((name for name, found in interfaces().items() if own in found), "")
    return name, own


def host_facts() -> dict[str, Any]:
    """Return what a rank tells of its host."""
    name = socket.gethostname()
    found = interfaces()
    return {
        "host": name,
        "name": name,
        "machine": _machine(),
        "pid": os.getpid(),
        "interfaces": found,
        "outside": [
            address
            for own in found.values()
            for address in own
            if not (ip_address(address).is_loopback or ip_address(address).is_link_local)
        ],
        "own_name": addresses_of_name(name),
        "hosts_line": _line_of_hosts(name),
        "shared_memory": _shared_memory(),
        "iommu": _iommu(),
        "variables": {
            key: os.environ[key]
            for key in sorted(os.environ)
            if key.startswith(("GLOO_SOCKET", "NCCL_")) or key in ("MASTER_ADDR", "MASTER_PORT")
        },
    }


def _machine() -> str:
    """Return what tells this host from others of the same name: the number that the kernel got when it started."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


def _line_of_hosts(name: str) -> str:
    """Return the line of /etc/hosts that gives the host's own name a loopback address, if there is one."""
    with suppress(OSError):
        for line in _HOSTS.read_text(errors="replace").splitlines():
            words = line.partition("#")[0].split()
            if len(words) > 1 and words[0].startswith(("127.", "::1")) and name in words[1:]:
                return line.strip()
    return ""


def _shared_memory() -> tuple[int, int] | None:
    """Return size and free part of /dev/shm [bytes]."""
    with suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        return usage.total, usage.free
    return None


def _iommu() -> bool:
    """Return whether this host translates the addresses of its devices, which sends copies between GPUs astray."""
    with suppress(OSError):
        return any(Path("/sys/class/iommu").iterdir())
    return False
