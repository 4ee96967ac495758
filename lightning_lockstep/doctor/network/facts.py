"""What the agent of a rank reports about its host: names, addresses, interfaces, shared memory, peer-to-peer copies."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from lightning_lockstep.distributed.interfaces import address_towards, addresses_of

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
    """Return the addresses that a host name resolves to on this host; none where it cannot be resolved."""
    with suppress(UnicodeError):  # such as a label of more than 63 characters
        return addresses_of(name)
    return []


def interface_towards(address: str) -> tuple[str, str]:
    """Return the interface from which this host reaches another, and its own address there."""
    own = address_towards(address)
    if ip_address(own).is_loopback and not ip_address(address).is_loopback:
        return "", ""  # there is no route
    name = next((name for name, found in interfaces().items() if own in found), "")
    return name, own


def host_facts() -> dict[str, Any]:
    """Return what a rank reports about its host."""
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
    """Return what distinguishes this host from others of the same name: the boot identifier of its kernel."""
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
    """Return whether an IOMMU translates the addresses of devices, which can corrupt copies between GPUs."""
    with suppress(OSError):
        return any(Path("/sys/class/iommu").iterdir())
    return False
