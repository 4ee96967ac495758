"""What one rank does in the network test: looks at its host, connects to others, tests a backend in a process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import lightning_lockstep
from lightning_lockstep._system import memory_file, text_of
from lightning_lockstep._text import exit_in_words
from lightning_lockstep.distributed.rendezvous import address_towards, addresses_of
from lightning_lockstep.doctor import probes

# -- What a rank reports of its host: names, addresses, interfaces, shared memory, peer-to-peer copies --

_HOSTS = Path("/etc/hosts")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def host_facts() -> dict[str, Any]:
    """Return what a rank reports about its host."""
    name = socket.gethostname()
    found = interfaces()
    return {
        "version": lightning_lockstep.__version__,
        "name": name,
        "machine": _machine(),
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
        "variables": {name: os.environ[name] for name in _IFNAMES if name in os.environ},
    }


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


# -- Connections between hosts: one sends more than a packet, the other sends it back --

_SENT = bytes(range(256)) * 1024  # more than one packet of any size


def echo_server() -> socket.socket:
    """Take connections of other hosts, and send back what they send, until the socket is closed."""
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    threading.Thread(target=_accept, args=(listener,), name="doctor-echo", daemon=True).start()
    return listener


def _accept(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with suppress(OSError), connection:
        connection.settimeout(30)
        connection.sendall(_all_of(connection))


def _all_of(connection: socket.socket) -> bytes:
    """Return what the other end sends, until it sends no more."""
    received = b""
    while part := connection.recv(len(_SENT) - len(received)):
        received += part
    return received


def reach(addresses: Sequence[str], port: int, within: float) -> dict[str, Any]:  # within: [s], for each
    """Return at which address of a host its echo server answers and from which interface, or what was tried."""
    tried: list[str] = []
    for address in addresses:
        interface = _interface_towards(address)
        try:
            _send_there_and_back(address, port, within)
            return {"address": address, "interface": interface}
        except OSError as error:
            what = f"no answer within {within:.0f} s" if isinstance(error, TimeoutError) else str(error)
            start = f" from interface {interface}" if interface else ""
            tried.append(f"{address}:{port}{start}: {what}")
    return {"tried": tried or ["it has no address but loopback"]}


def _interface_towards(address: str) -> str:
    """Return the interface from which this host reaches an address; none where there is no route."""
    own = address_towards(address)
    if ip_address(own).is_loopback and not ip_address(address).is_loopback:
        return ""
    return next((name for name, found in interfaces().items() if own in found), "")


def _send_there_and_back(address: str, port: int, within: float) -> None:
    with socket.create_connection((address, port), timeout=within) as connection:
        connection.sendall(_SENT)
        if _all_of(connection) != _SENT:
            raise OSError("the connection was closed from there")


# -- The process in which a rank tests a backend: what could hang, hangs there --

PROBE = Path(str(probes.__path__[0]), "network_backend.py")
_TAIL = 1_500  # of what it prints [characters]
_LEAVE = 5.0  # how long a rank of MPI gets to end [s]
_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


class Probe:
    """The process of one rank; it takes its steps by itself and answers for each."""

    def __init__(
        self, backend: str, arguments: Sequence[object] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        # environ: in addition to the variables of this process
        self._backend = backend
        self._answers: dict[str, dict[str, Any]] = {}
        self._errors, self._nccl = memory_file(), memory_file()
        os.set_inheritable(self._nccl.fileno(), True)
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"/proc/self/fd/{self._nccl.fileno()}"}
        command = [sys.executable, "-u", str(PROBE), backend, *map(str, arguments)]
        if sys.platform == "linux":  # Linux kills it when the thread that has started it ends
            command = [sys.executable, "-I", "-S", "-c", _WITH_PARENT, *command]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **log, **(environ or {})},
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # MPICH's mpiexec and Slurm's PMI-2 exchange messages with a rank over a descriptor that it inherits.
            close_fds=False,
        )

    def go_on(self, **given: object) -> None:
        """Have it take the steps in which it waits for other ranks."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, and its answer says so
            self._process.stdin.write(json.dumps(given).encode() + b"\n")

    def steps(self, limits: Mapping[str, float]) -> dict[str, dict[str, Any]]:
        """Return the answer of each step, or how it did not answer in time [s], up to the first that failed."""
        # Where ``ok`` is false there is an ``error`` too, and ``late`` or ``ended`` where it did not answer.
        taken: dict[str, dict[str, Any]] = {}
        for step, within in limits.items():
            if step not in self._answers:
                self._answers[step] = self._answer(within)
            taken[step] = self._answers[step]
            if not taken[step]["ok"]:
                break
        return taken

    def _answer(self, within: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + within
        while wait([self._process.stdout.fileno()], max(0.0, deadline - time.monotonic())):
            line = self._process.stdout.readline()
            if not line:
                code = self._process.wait()
                return self._fault(ended=code, error=f"its process ended: {exit_in_words(code)}")
            with suppress(
                ValueError, TypeError, KeyError
            ):  # what Python itself may print before the program begins
                answer = json.loads(line)
                return answer if answer["ok"] else self._fault(**answer)
        return self._fault(late=True, error=f"no answer within {within:.0f} s")

    def _fault(self, **answer: Any) -> dict[str, Any]:
        lines = text_of(self._nccl).splitlines()
        debug = [line for line in lines if " WARN " in line or "fail" in line.lower()] or lines
        printed = text_of(self._errors)[-_TAIL:]
        return {**answer, "ok": False, "printed": printed, "debug": "\n".join(debug[-8:])}

    def end(self) -> None:
        """End it, whatever it does; ranks of MPI may end by themselves first."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if self._backend == "mpi4py":
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # it may hang in a driver, where no signal ends it
            self._process.wait(_LEAVE)
        self._process.stdout.close()
        self._errors.close()
        self._nccl.close()
