"""Lines of JSON between the coordinator and the agent of each rank: over TCP, or over the pipes of ssh.

What arrives is data whose types are checked where it is used. Over TCP both ends first prove that they know the job's
token, which is never sent, and then sign each line with a key of this connection: whoever only forwards lines cannot
change or add one.
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
_HANDSHAKE = 3.0  # longest time that rank 0 gives who has connected to prove itself [s]
_ANSWER = 10.0  # longest wait for rank 0, which looks at one connection after the other [s]
_LONGEST_HANDSHAKE = 1_000  # of one line [bytes]
_NONCE = re.compile(r"[0-9a-f]{64}")
_END = 2.0  # longest wait for the thread that reads [s]
_PAUSE = 0.2  # between two attempts [s]


class ClosedError(Exception):
    """The other end has closed the connection."""


class _Writer(Protocol):
    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class _Signer:
    """Signs the lines of one connection: each with its direction and number, under the key of this connection."""

    def __init__(self, key: bytes, *, at_rank_0: bool) -> None:
        self._key = key
        self._sends, self._receives = (b"down", b"up") if at_rank_0 else (b"up", b"down")
        self._sent = self._received = 0

    def signed(self, line: bytes) -> bytes:
        self._sent += 1
        return self._digest(self._sends, self._sent, line) + b" " + line

    def verified(self, line: bytes) -> bytes | None:
        """Return the content of a line, or ``None`` where the other end has not signed it."""
        digest, _, content = line.rstrip(b"\n").partition(b" ")
        self._received += 1
        is_theirs = hmac.compare_digest(digest, self._digest(self._receives, self._received, content))
        return content if is_theirs else None

    def _digest(self, direction: bytes, number: int, line: bytes) -> bytes:
        content = b"%s %d %s" % (direction, number, line)
        return hmac.digest(self._key, content, "sha256").hex().encode()


class Link:
    """One end of a connection; a thread of its own reads, so that no wait is without a limit."""

    def __init__(
        self,
        reader: IO[bytes],
        writer: _Writer,
        close: Callable[[], None],
        signer: _Signer | None = None,  # None where nobody else has the two ends, as with pipes
    ) -> None:
        self._reader, self._writer, self._close, self._signer = reader, writer, close, signer
        self._received: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(reader,), name="doctor-link", daemon=True)
        self._thread.start()

    @classmethod
    def of_socket(cls, connection: socket.socket, signer: _Signer | None = None) -> Link:
        """Return the link over a connected socket, which is closed with it."""
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, writer = connection.makefile("rb"), connection.makefile("wb", buffering=0)
        return cls(reader, writer, lambda: _shut(connection), signer)

    def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode()
        try:
            self._writer.write((self._signer.signed(line) if self._signer else line) + b"\n")
            self._writer.flush()
        except (OSError, ValueError) as error:
            raise ClosedError(str(error)) from error

    def receive(self, timeout: float) -> dict[str, Any] | None:  # timeout: [s]
        """Return the next message, or ``None`` when the time is over."""
        try:
            message = self._received.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            return None
        if message is None:
            self._received.put(None)  # for who asks again
            raise ClosedError("the connection was closed")
        return message

    def close(self) -> None:
        self._close()
        if self._thread is not threading.current_thread():
            self._thread.join(_END)
        if not self._thread.is_alive():
            self._reader.close()

    def _read(self, reader: IO[bytes]) -> None:
        with suppress(OSError, ValueError):
            while line := reader.readline(_LONGEST):
                content = self._signer.verified(line) if self._signer else line
                if content is None:
                    break  # not from the other end: nothing more is read from this connection
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
    """Return a socket that listens at the first free port; of 0, at any."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        with suppress(OSError):
            return socket.create_server((address, port), family=family)
    raise OSError(f"no port of {', '.join(map(str, ports))} is free at {address}")


def accept_ranks(server: socket.socket, token: str, expected: set[int], timeout: float) -> dict[int, Link]:
    """Return the link of every rank that has come in time [s]."""
    found: dict[int, Link] = {}
    deadline = time.monotonic() + timeout
    while expected - set(found) and (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            connection, _ = server.accept()
        except OSError:
            break
        proven = _proven(connection, token, time.monotonic() + min(left, _HANDSHAKE))
        if proven is None or proven[0] not in expected - set(found):
            connection.close()
            continue
        rank, signer = proven
        found[rank] = Link.of_socket(connection, signer)
    return found


def connect(
    addresses: list[tuple[str, int]], token: str, rank: int, timeout: float
) -> tuple[Link | None, str]:  # timeout: [s]
    """Return the link to the coordinator, tried at each address until the time is over, or why there is none."""
    deadline = time.monotonic() + timeout
    faults: dict[str, str] = {}
    while time.monotonic() < deadline:
        for host, port in addresses:
            try:
                connection = socket.create_connection((host, port), timeout=_CONNECT)
            except OSError as error:
                faults[f"{host}:{port}"] = str(error)
                continue
            signer = _trusted(connection, token, rank, min(deadline, time.monotonic() + _ANSWER))
            if signer is not None:
                return Link.of_socket(connection, signer), ""
            connection.close()
            faults[f"{host}:{port}"] = (
                "the process listening there did not prove that it is rank 0 of this job"
            )
        time.sleep(_PAUSE)
    return None, "; ".join(f"{place}: {fault}" for place, fault in faults.items()) or "no address is known"


def _proven(connection: socket.socket, token: str, deadline: float) -> tuple[int, _Signer] | None:
    """Return which rank has connected and the signer of its connection; ``None`` for any other process.

    Rank 0 proves itself first: another process that listens in its place receives a rank's number and nothing more.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        asked = _receive_handshake(connection, deadline)
        rank, theirs, ours = int(asked["rank"]), _nonce(asked), secrets.token_hex(32)
        _send_handshake(connection, {"nonce": ours, "proof": _proof(token, "rank 0", rank, theirs, ours)})
        answer = _receive_handshake(connection, deadline)
        if hmac.compare_digest(str(answer["proof"]), _proof(token, "rank", rank, theirs, ours)):
            return rank, _Signer(_proof(token, "lines", rank, theirs, ours).encode(), at_rank_0=True)
    return None


def _trusted(connection: socket.socket, token: str, rank: int, deadline: float) -> _Signer | None:
    """Return the signer of a connection that leads to rank 0, ``None`` where it leads to another process."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        ours = secrets.token_hex(32)
        _send_handshake(connection, {"rank": rank, "nonce": ours})
        answer = _receive_handshake(connection, deadline)
        theirs = _nonce(answer)
        if hmac.compare_digest(str(answer["proof"]), _proof(token, "rank 0", rank, ours, theirs)):
            _send_handshake(connection, {"proof": _proof(token, "rank", rank, ours, theirs)})
            return _Signer(_proof(token, "lines", rank, ours, theirs).encode(), at_rank_0=False)
    return None


def _proof(token: str, what: str, rank: int, nonce_of_rank: str, nonce_of_rank_0: str) -> str:
    content = f"{what}\0{rank}\0{nonce_of_rank}\0{nonce_of_rank_0}"
    return hmac.digest(token.encode(), content.encode(), "sha256").hex()


def _nonce(message: dict[str, Any]) -> str:
    nonce = message["nonce"]
    if not _NONCE.fullmatch(nonce):
        raise ValueError("no nonce")
    return str(nonce)


def _send_handshake(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive_handshake(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the next line of a handshake, read byte by byte: what follows it is the link's."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        byte = connection.recv(1)
        if not byte or len(line) > _LONGEST_HANDSHAKE:
            raise ValueError("no handshake")
        line += byte
    return dict(json.loads(line))
