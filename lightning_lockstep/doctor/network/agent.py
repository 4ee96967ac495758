"""What runs for each rank: it does what the coordinator asks, always answers in time, and needs no torch itself.

The step that could hang is taken by a process of its own (:mod:`.rank_process`), so that the agent can still report
that it hangs. ``python -m lightning_lockstep.doctor.network.agent`` is an agent at the other end of ssh's pipes.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.network.facts import addresses_of_name, host_facts, interface_towards
from lightning_lockstep.doctor.network.links import ClosedError, Link
from lightning_lockstep.doctor.network.rank_process import RankProcess

__all__ = ["Agent", "serve_pipes"]

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
