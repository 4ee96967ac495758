"""Lines of JSON between the coordinator and the agent of each rank: over TCP, or over the pipes of ssh.

What arrives is data, checked for its kind where it is used. A connection that does not begin with the job's word is
closed.
"""

from __future__ import annotations

import hmac
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Protocol

__all__ = ["ClosedError", "Link", "accept_ranks", "connect", "listen_at"]

_LONGEST = 4_000_000  # of a line [bytes]
_CONNECT = 3.0  # longest wait for one address [s]
_END = 2.0  # longest wait for the thread that reads [s]
_PAUSE = 0.2  # between two attempts [s]


class ClosedError(Exception):
    """The other end is gone."""


class _Writer(Protocol):
    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Link:
    """One end of a connection; a thread of its own reads, so that no wait is without a limit.

    Args:
        reader: Where lines come from.
        writer: Where lines go.
        close: Ends the connection.
    """

    def __init__(self, reader: IO[bytes], writer: _Writer, close: Callable[[], None]) -> None:
        self._writer, self._close = writer, close
        self._received: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(reader,), name="doctor-link", daemon=True)
        self._thread.start()

    @classmethod
    def of_socket(cls, connection: socket.socket) -> Link:
        """Return the link over a connected socket.

        Args:
            connection: The socket; closed with the link.
        """
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(
            connection.makefile("rb"), connection.makefile("wb", buffering=0), lambda: _shut(connection)
        )

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            ClosedError: The other end is gone.
        """
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.flush()
        except (OSError, ValueError) as error:
            raise ClosedError(str(error)) from error

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """Return the next message, or ``None`` when the time is over.

        Args:
            timeout: Longest wait [s].

        Raises:
            ClosedError: The other end is gone.
        """
        try:
            message = self._received.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            return None
        if message is None:
            self._received.put(None)  # for who asks again
            raise ClosedError("the connection has ended")
        return message

    def close(self) -> None:
        """End the connection."""
        self._close()
        if self._thread is not threading.current_thread():
            self._thread.join(_END)

    def _read(self, reader: IO[bytes]) -> None:
        with suppress(OSError, ValueError):
            while line := reader.readline(_LONGEST):
                with suppress(ValueError):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        self._received.put(message)
        self._received.put(None)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def listen_at(address: str, ports: list[int]) -> socket.socket:
    """Return a socket that listens at the first free port.

    Args:
        address: Address of this host, or ``0.0.0.0``.
        ports: The ports to try; 0 for any.

    Raises:
        OSError: All of them are taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        with suppress(OSError):
            return socket.create_server((address, port), family=family)
    raise OSError(f"no port of {', '.join(map(str, ports))} is free at {address}")


def accept_ranks(server: socket.socket, word: str, expected: set[int], timeout: float) -> dict[int, Link]:
    """Return the link of every rank that has come in time.

    Args:
        server: Listens.
        word: What a rank of this job begins with.
        expected: The ranks to wait for.
        timeout: Longest wait [s].
    """
    found: dict[int, Link] = {}
    deadline = time.monotonic() + timeout
    while expected - set(found) and (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            connection, _ = server.accept()
        except OSError:
            break
        connection.settimeout(min(left, _CONNECT))
        rank = _greeted(connection, word)
        if rank is None or rank not in expected:
            connection.close()
            continue
        link = Link.of_socket(connection)
        with suppress(ClosedError):
            link.send({"word": word})
            found[rank] = link
    return found


def _greeted(connection: socket.socket, word: str) -> int | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        line = b""
        while not line.endswith(b"\n") and len(line) < 1_000:  # one at a time: what follows is the link's
            byte = connection.recv(1)
            if not byte:
                return None
            line += byte
        greeting = json.loads(line)
        if hmac.compare_digest(str(greeting["word"]).encode(), word.encode()):
            return int(greeting["rank"])
    return None


def connect(
    addresses: list[tuple[str, int]], word: str, rank: int, timeout: float
) -> tuple[Link | None, str]:
    """Return the link to the coordinator, tried at each address until the time is over, or why there is none.

    Args:
        addresses: Where it may listen.
        word: What a rank of this job begins with.
        rank: This rank.
        timeout: Longest time [s].
    """
    deadline = time.monotonic() + timeout
    faults: dict[str, str] = {}
    while time.monotonic() < deadline:
        for host, port in addresses:
            try:
                connection = socket.create_connection((host, port), timeout=_CONNECT)
            except OSError as error:
                faults[f"{host}:{port}"] = str(error)
                continue
            link = Link.of_socket(connection)
            with suppress(ClosedError):
                link.send({"word": word, "rank": rank})
                if (link.receive(timeout) or {}).get("word") == word:
                    return link, ""
            faults[f"{host}:{port}"] = "another program listens there"
            link.close()
        time.sleep(_PAUSE)
    return None, "; ".join(f"{place}: {fault}" for place, fault in faults.items()) or "no address is known"
