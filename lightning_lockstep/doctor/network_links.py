"""Messages between the coordinator of a network test and its agents, and all agents as it sees them."""

from __future__ import annotations

import hmac
import json
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Protocol

# -- Lines of JSON between the coordinator and the agent of each rank: over TCP, or over the pipes of ssh
# What arrives is data whose types are checked where it is used. Over TCP both ends first prove that they
# know the job's token, which is never sent, and then sign each line with a key of this connection: whoever
# only forwards lines cannot change or add one.

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
    """Return which rank has connected and the signer of its connection; ``None`` for any other process."""
    # Rank 0 proves itself first: another process that listens in its place receives a rank's number and
    # nothing more.
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


# -- All agents of a test, as the coordinator sees them: one request to all, with one deadline --

_MARGIN = 5.0  # for the answer itself to arrive [s]
_LOOK_EVERY = 0.05
_CLOSED = 10.0  # longest wait for an agent of this process to end [s]


class AgentGroup:
    def __init__(
        self,
        links: Mapping[int, Link],
        size: int,
        missing: Mapping[int, str],  # why a rank has no agent, as far as known
        threads: Sequence[threading.Thread] = (),  # in which agents of this process serve
    ) -> None:
        self._threads = threads
        self.links, self.size, self.missing = dict(links), size, dict(missing)
        self.facts: dict[int, dict[str, Any]] = {}  # about its host, as each rank has reported
        self.fixes: dict[int, tuple[str, ...]] = {}  # lines to paste for a rank that has not
        self._number = 0

    @property
    def ranks(self) -> list[int]:
        """The ranks that have reported."""
        return sorted(self.facts)

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The ranks of each host."""
        found: dict[str, list[int]] = {}
        for rank in self.ranks:
            found.setdefault(self.host(rank), []).append(rank)
        return found

    def host(self, rank: int) -> str:
        return str(self.facts.get(rank, {}).get("host", "?"))

    def give_hosts_unique_names(self) -> None:
        """Add an address to the names of hosts that share one, such as ``localhost``."""
        machines: dict[str, set[str]] = {}
        for facts in self.facts.values():
            machines.setdefault(str(facts.get("name")), set()).add(str(facts.get("machine")))
        for facts in self.facts.values():
            name, machine = str(facts.get("name")), str(facts.get("machine"))
            address = next(iter(facts.get("outside", [])), machine)
            facts["host"] = f"{name} ({address})" if len(machines[name]) > 1 else name

    def local_rank(self, rank: int) -> int:
        """Return a rank's place among those of its host."""
        return self.hosts[self.host(rank)].index(rank)

    def ask(
        self,
        do: str,
        within: float,  # that it may take there [s]
        given: Mapping[str, Any] | Callable[[int], Mapping[str, Any]],  # the same for all, or by rank
        ranks: list[int] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Have agents do something; return the answer of each, with ``silent`` where one has ended or is late."""
        asked = self.ranks if ranks is None else ranks
        self._number += 1
        answers: dict[int, dict[str, Any]] = {}
        for rank in asked:
            wanted = given(rank) if callable(given) else given
            try:
                self.links[rank].send({"number": self._number, "do": do, "given": dict(wanted)})
            except ClosedError as error:
                answers[rank] = _silent(f"its agent has closed the connection ({error})")
        deadline = time.monotonic() + within + _MARGIN
        while (open_ranks := [rank for rank in asked if rank not in answers]) and time.monotonic() < deadline:
            for rank in open_ranks:
                self._look(rank, answers)
        for rank in asked:
            answers.setdefault(rank, _silent(f"its agent did not answer within {within + _MARGIN:.0f} s"))
        return answers

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        for thread in self._threads:
            thread.join(_CLOSED)

    def _look(self, rank: int, answers: dict[int, dict[str, Any]]) -> None:
        try:
            message = self.links[rank].receive(_LOOK_EVERY)
        except ClosedError as error:
            answers[rank] = _silent(f"its agent has closed the connection ({error})")
            return
        if message is not None and message.get("number") == self._number:
            answer = message.get("answer")
            answers[rank] = answer if isinstance(answer, dict) else {"ok": False, "error": "no answer"}


def _silent(error: str) -> dict[str, Any]:
    return {"ok": False, "silent": True, "error": error}
