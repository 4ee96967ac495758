"""Runs for each rank and does what the coordinator asks; the process in which a backend is tested."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from lightning_lockstep._text import exit_in_words
from lightning_lockstep.distributed.rendezvous import address_towards, addresses_of
from lightning_lockstep.doctor import probes
from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.network_links import ClosedError, Link

# -- What the agent of a rank reports about its host: names, addresses, interfaces, shared memory,
# peer-to-peer copies

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


# -- The process in which a rank tests a backend: asked for one step at a time, each with a deadline --

_TAIL = 1_500  # of what it prints [characters]
_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


class RankProcess:
    """A probe that answers to steps."""

    def __init__(self, program: str, arguments: list[str], environ: Mapping[str, str]) -> None:
        # environ: beside the variables of this process
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when a step fails
        command = [sys.executable, "-u", str(Path(str(probes.__path__[0]), program)), *arguments]
        if sys.platform == "linux":  # Linux kills it when this process ends
            command = [sys.executable, "-I", "-S", "-c", _WITH_PARENT, *command]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # MPICH's mpiexec and Slurm's PMI-2 exchange messages with a rank over a descriptor that it inherits.
            close_fds=False,
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="doctor-rank", daemon=True).start()

    def step(self, name: str, within: float, given: Mapping[str, Any]) -> dict[str, Any]:
        """Have it take a step; return its answer, or how it did not answer."""
        # Where ``ok`` is false there is an ``error`` too, and ``late`` (not within that time [s]) or
        # ``ended`` (exit code).
        began = time.monotonic()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps({"step": name, **given}).encode() + b"\n")
            self._process.stdin.flush()
        try:
            answer = self._answers.get(timeout=within)
        except queue.Empty:
            return {"ok": False, "late": True, "error": f"no answer within {within:.0f} s", **self._printed()}
        if answer is None:
            code = self._process.wait()
            return {
                "ok": False,
                "ended": code,
                "error": f"its process ended: {exit_in_words(code)}",
                **self._printed(),
            }
        seconds = round(time.monotonic() - began, 6)
        return {**answer, "seconds": seconds, **({} if answer.get("ok") else self._printed())}

    def end(self) -> None:
        """End it, whatever it does."""
        with suppress(OSError):
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._errors):
            with suppress(OSError):
                if stream is not None:
                    stream.close()

    def leave(self, patience: float) -> None:  # patience: [s]
        """Let it end by itself, as ranks of MPI must; end it when the time is over."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self.end()

    def _printed(self) -> dict[str, str]:
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        return {"printed": text[-_TAIL:]}

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError), self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):
                    answer = json.loads(line)
                    if isinstance(answer, dict):
                        self._answers.put(answer)
        self._answers.put(None)


# -- What runs for each rank: it does what the coordinator asks, always answers in time, and needs no torch
# itself
#
# The step that could hang is taken by a process of its own (`RankProcess`), so that the agent can
# still report that it hangs. ``python -m lightning_lockstep.doctor.network_agent`` is an agent at the other
# end of ssh's pipes.

_IDLE = 600.0  # an agent that receives no message from the coordinator for so long ends [s]
_PATTERN = bytes(range(256)) * 1024  # more than one packet of any size
_LEAVE = 5.0  # how long a rank of MPI gets to end [s]
# All that a coordinator may set for a rank: other variables, NCCL_NET_PLUGIN among them, would load code.
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_P2P_DISABLE")


class Agent:
    def __init__(self, rank: int, started: RankProcess | None = None, checks: Checks | None = None) -> None:
        self.rank = rank
        # The coordinator may ask for them, but cannot say which, or with what options.
        self._of_this_host = checks
        # MPI may have been started already, to find the coordinator.
        self._processes: dict[str, RankProcess] = {} if started is None else {"mpi4py": started}
        self._debug_folders: dict[str, str] = {}
        self._listener: socket.socket | None = None

    def serve(self, link: Link) -> None:
        """Do what is asked until there is no more."""
        actions: dict[str, Callable[..., Any]] = {
            "facts": host_facts,
            "checks": self._checks,
            "resolve": _resolve,
            "listen": self._listen,
            "reach": _reach,
            "begin": self._begin,
            "step": self._step,
            "end": self._end,
        }
        try:
            while (asked := link.receive(_IDLE)) is not None and asked.get("do") in actions:
                number = asked.get("number")
                try:
                    answer = actions[asked["do"]](**asked.get("given", {}))
                except (OSError, TypeError, ValueError) as error:
                    answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
                link.send({"number": number, "answer": answer})
        except ClosedError:
            pass
        finally:
            self.close()

    def close(self) -> None:
        for backend in list(self._processes):
            self._end(backend)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _checks(self) -> dict[str, Any]:
        """Run the other checks of this rank's command line on this host."""
        found = self._of_this_host.results() if self._of_this_host is not None else ()
        return {"checks": [result.to_json() for result in found]}

    def _listen(self, address: str) -> dict[str, Any]:
        """Take connections of other hosts, and send back what they send."""
        try:
            self._listener = socket.create_server(
                (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
            )
        except OSError as error:
            return {"error": str(error)}
        threading.Thread(target=_echo, args=(self._listener,), name="doctor-echo", daemon=True).start()
        return {"address": address, "port": self._listener.getsockname()[1]}

    def _begin(
        self, backend: str, size: int, local_rank: int, environ: dict[str, str], debug: bool
    ) -> dict[str, Any]:
        """Start the process that tests a backend."""
        name = backend.partition("+")[0]
        if others := sorted(set(environ) - set(_VARIABLES)):
            raise ValueError(f"expected only {', '.join(_VARIABLES)}, not {', '.join(others)}")
        given = dict(environ)
        if debug and "NCCL_DEBUG" not in os.environ:
            self._debug_folders[backend] = folder = tempfile.mkdtemp(prefix="lockstep-nccl-")
            given |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/%h.%p"}
        if name == "mpi4py":
            if backend not in self._processes:
                self._processes[backend] = RankProcess("network_mpi.py", [], given)
        else:
            arguments = [name, str(self.rank), str(size), str(local_rank)]
            self._processes[backend] = RankProcess("network_torch.py", arguments, given)
        return {"ok": True}

    def _step(self, backend: str, step: str, within: float, given: dict[str, Any]) -> dict[str, Any]:
        process = self._processes.get(backend)
        if process is None:
            return {"ok": False, "error": "its process was not started"}
        answer = process.step(step, within, given)
        if not answer.get("ok") and (folder := self._debug_folders.get(backend)):
            answer["debug"] = _warnings_in(Path(folder))
        return answer

    def _end(self, backend: str) -> dict[str, Any]:
        process = self._processes.pop(backend, None)
        if process is not None:
            if backend.startswith("mpi4py"):
                process.leave(_LEAVE)
            else:
                process.end()
        if folder := self._debug_folders.pop(backend, None):
            _delete(Path(folder))
        return {"ok": True}


def _warnings_in(folder: Path) -> str:
    """Return what NCCL has written of faults, else its last lines."""
    lines: list[str] = []
    for file in sorted(folder.glob("*")):
        with suppress(OSError):
            lines += file.read_text(errors="replace").splitlines()
    faults = [line for line in lines if " WARN " in line or "fail" in line.lower()]
    return "\n".join((faults or lines)[-8:])


def _delete(folder: Path) -> None:
    with suppress(OSError):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def _resolve(names: list[str]) -> dict[str, list[str]]:
    return {name: addresses_of_name(name) for name in names}


def _reach(address: str, port: int, within: float) -> dict[str, Any]:
    """Connect to the agent of another host, and send more than one packet there and back."""
    name, own = interface_towards(address)
    place = {"interface": name, "own": own}
    try:
        with socket.create_connection((address, port), timeout=within) as connection:
            connection.settimeout(within)
            threading.Thread(target=_send, args=(connection,), daemon=True).start()
            received = b""
            while len(received) < len(_PATTERN):
                part = connection.recv(1 << 16)
                if not part:
                    raise OSError("the connection was closed from there")
                received += part
    except OSError as error:
        late = isinstance(error, TimeoutError)
        return {
            **place,
            "ok": False,
            "late": late,
            "error": f"no answer within {within:.0f} s" if late else str(error),
        }
    return {**place, "ok": received == _PATTERN, "error": "other bytes came back"}


def _send(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.sendall(_PATTERN)


def _echo(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_echo_one, args=(connection,), daemon=True).start()


def _echo_one(connection: socket.socket) -> None:
    with suppress(OSError), connection:
        connection.settimeout(30)
        left = len(_PATTERN)
        while left > 0 and (part := connection.recv(1 << 16)):
            connection.sendall(part)
            left -= len(part)
        connection.recv(1)  # until the other end closes


def serve_pipes() -> None:
    """Serve a coordinator at the other end of standard input and output."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what else is printed is no answer
    link = Link(sys.stdin.buffer, answers, lambda: None)
    first = link.receive(_IDLE) or {}
    if isinstance(first.get("rank"), int):
        Agent(first["rank"]).serve(link)


if __name__ == "__main__":
    serve_pipes()
    os._exit(0)  # the thread that reads may sit in a read
