"""Lines of JSON between the coordinator and the agent of each rank: over TCP, or over the pipes of ssh.

What arrives is data, checked for its kind where it is used. Over TCP both ends first prove that they know the job's
word, which is never sent, and then mark each line with a key that is made for this connection: who only passes lines
on cannot change or add one.
"""

from __future__ import annotations

import hmac
import json
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Protocol

__all__ = ["ClosedError", "Link", "accept_ranks", "connect", "listen_at"]

_LONGEST = 4_000_000  # of a line [bytes]
_CONNECT = 3.0  # longest wait for one address [s]
_GREETING = 3.0  # longest time that rank 0 gives who has connected to prove itself [s]
_ANSWER = 10.0  # longest wait for rank 0, which looks at one connection after the other [s]
_LONGEST_GREETING = 1_000  # of one line [bytes]
_NONCE = re.compile(r"[0-9a-f]{64}")
_END = 2.0  # longest wait for the thread that reads [s]
_PAUSE = 0.2  # between two attempts [s]


class ClosedError(Exception):
    """The other end is gone."""


class _Writer(Protocol):
    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class _Seal:
    """What marks the lines of one connection: each with its direction and number, under the key of this connection."""

    def __init__(self, key: bytes, *, at_rank_0: bool) -> None:
        self._key = key
        self._sends, self._receives = (b"down", b"up") if at_rank_0 else (b"up", b"down")
        self._sent = self._received = 0

    def sealed(self, line: bytes) -> bytes:
        self._sent += 1
        return self._mark(self._sends, self._sent, line) + b" " + line

    def opened(self, line: bytes) -> bytes | None:
        """Return what a line holds, or ``None`` where the other end has not sent it."""
        mark, _, content = line.rstrip(b"\n").partition(b" ")
        self._received += 1
        is_theirs = hmac.compare_digest(mark, self._mark(self._receives, self._received, content))
        return content if is_theirs else None

    def _mark(self, direction: bytes, number: int, line: bytes) -> bytes:
        content = b"%s %d %s" % (direction, number, line)
        return hmac.digest(self._key, content, "sha256").hex().encode()


class Link:
    """One end of a connection; a thread of its own reads, so that no wait is without a limit.

    Args:
        reader: Where lines come from.
        writer: Where lines go.
        close: Ends the connection.
        seal: Marks each line; ``None`` where nobody else has the two ends, as with pipes.
    """

    def __init__(
        self,
        reader: IO[bytes],
        writer: _Writer,
        close: Callable[[], None],
        seal: _Seal | None = None,
    ) -> None:
        self._reader, self._writer, self._close, self._seal = reader, writer, close, seal
        self._received: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(reader,), name="doctor-link", daemon=True)
        self._thread.start()

    @classmethod
    def of_socket(cls, connection: socket.socket, seal: _Seal | None = None) -> Link:
        """Return the link over a connected socket.

        Args:
            connection: The socket; closed with the link.
            seal: Marks each line.
        """
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, writer = connection.makefile("rb"), connection.makefile("wb", buffering=0)
        return cls(reader, writer, lambda: _shut(connection), seal)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            ClosedError: The other end is gone.
        """
        line = json.dumps(message).encode()
        try:
            self._writer.write((self._seal.sealed(line) if self._seal else line) + b"\n")
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
        if not self._thread.is_alive():
            self._reader.close()

    def _read(self, reader: IO[bytes]) -> None:
        with suppress(OSError, ValueError):
            while line := reader.readline(_LONGEST):
                content = self._seal.opened(line) if self._seal else line
                if content is None:
                    break  # somebody between the two ends: nothing more is taken from this connection
                with suppress(ValueError):
                    message = json.loads(content)
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
        word: What only the ranks of this job know.
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
        proven = _proven(connection, word, time.monotonic() + min(left, _GREETING))
        if proven is None or proven[0] not in expected - set(found):
            connection.close()
            continue
        rank, seal = proven
        found[rank] = Link.of_socket(connection, seal)
    return found


def connect(
    addresses: list[tuple[str, int]], word: str, rank: int, timeout: float
) -> tuple[Link | None, str]:
    """Return the link to the coordinator, tried at each address until the time is over, or why there is none.

    Args:
        addresses: Where it may listen.
        word: What only the ranks of this job know.
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
            seal = _trusted(connection, word, rank, min(deadline, time.monotonic() + _ANSWER))
            if seal is not None:
                return Link.of_socket(connection, seal), ""
            connection.close()
            faults[f"{host}:{port}"] = "what listens there does not prove that it is rank 0 of this job"
        time.sleep(_PAUSE)
    return None, "; ".join(f"{place}: {fault}" for place, fault in faults.items()) or "no address is known"


def _proven(connection: socket.socket, word: str, deadline: float) -> tuple[int, _Seal] | None:
    """Return which rank has connected and the seal of its connection; ``None`` for a stranger.

    Rank 0 proves itself first: a rank tells a stranger that listens in its place nothing but its number.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        asked = _hear(connection, deadline)
        rank, theirs, ours = int(asked["rank"]), _nonce(asked), secrets.token_hex(32)
        _say(connection, {"nonce": ours, "proof": _made_of(word, "rank 0", rank, theirs, ours)})
        answer = _hear(connection, deadline)
        if hmac.compare_digest(str(answer["proof"]), _made_of(word, "rank", rank, theirs, ours)):
            return rank, _Seal(_made_of(word, "lines", rank, theirs, ours).encode(), at_rank_0=True)
    return None


def _trusted(connection: socket.socket, word: str, rank: int, deadline: float) -> _Seal | None:
    """Return the seal of a connection that leads to rank 0, ``None`` where it leads to somebody else."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        ours = secrets.token_hex(32)
        _say(connection, {"rank": rank, "nonce": ours})
        answer = _hear(connection, deadline)
        theirs = _nonce(answer)
        if hmac.compare_digest(str(answer["proof"]), _made_of(word, "rank 0", rank, ours, theirs)):
            _say(connection, {"proof": _made_of(word, "rank", rank, ours, theirs)})
            return _Seal(_made_of(word, "lines", rank, ours, theirs).encode(), at_rank_0=False)
    return None


def _made_of(word: str, what: str, rank: int, nonce_of_rank: str, nonce_of_rank_0: str) -> str:
    content = f"{what}\0{rank}\0{nonce_of_rank}\0{nonce_of_rank_0}"
    return hmac.digest(word.encode(), content.encode(), "sha256").hex()


def _nonce(message: dict[str, Any]) -> str:
    nonce = message["nonce"]
    if not _NONCE.fullmatch(nonce):
        raise ValueError("no nonce")
    return str(nonce)


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _hear(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the next line of a greeting, read byte by byte: what follows it is the link's."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        byte = connection.recv(1)
        if not byte or len(line) > _LONGEST_GREETING:
            raise ValueError("no greeting")
        line += byte
    return dict(json.loads(line))
