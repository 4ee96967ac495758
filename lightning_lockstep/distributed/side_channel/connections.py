"""The connections between ranks: links, addresses, the thread that receives, and what has become of a peer."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socket import gethostname
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_lockstep.distributed.rendezvous import ChannelKeys

# -- The connections by which a rank sends: one to each peer that it has something for --

HELLO, POST, WHERE, ADDRESS = b"hello", b"post", b"where", b"address"
FLUSH, ARRIVED, CLOSING = b"flush", b"arrived", b"closing"
#: Where the sending thread reaches the receiving one, and what it says there of a new monitor.
WAKE, MONITOR = "inproc://wake", b"monitor"
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
# Messages for a peer whose address is not known yet; older ones are dropped beyond this number.
_KEPT_UNSENT = 10_000
# How long what was sent last may still take to leave when a connection is closed [ms].
_LINGER = 1000


class Links:
    """Connections to peers, made when first used. Belongs to the thread that makes it."""

    def __init__(
        self,
        context: Any,
        rank: int,
        address: str,  # where this rank listens, for the peers
        keys: ChannelKeys,
        heartbeat: tuple[float, float],  # interval and timeout [s]
        # Gets (rank, address, socket) of each connection by which a peer is watched.
        monitors: queue.SimpleQueue[tuple[int, str, Any]],
    ) -> None:
        self._context, self._rank = context, rank
        self._hello = json.dumps([address, gethostname(), os.getpid()]).encode()
        self._keys, self._heartbeat, self._monitors = keys, heartbeat, monitors
        self._sockets: dict[int, Any] = {}
        self._addresses: dict[int, str] = {}
        self._unsent: dict[int, deque[tuple[bytes, ...]]] = defaultdict(lambda: deque(maxlen=_KEPT_UNSENT))
        self.used: set[int] = set()  # peers that were sent something
        self._wake = context.socket(zmq.PUSH)
        self._wake.connect(WAKE)

    def send(self, to: int, frames: tuple[bytes, ...]) -> None:
        """Send a message to a peer, or keep it until the peer's address is known."""
        if to == self._rank:
            self._wake.send_multipart(frames)
        elif to in self._addresses:
            self.used.add(to)
            self._socket(to).send_multipart(frames)
        else:
            if self._rank != 0 and not self._unsent[to]:
                self.send(0, (WHERE, str(to).encode()))
            self._unsent[to].append(frames)

    def reached(self, rank: int, address: str) -> None:
        """Note where a peer listens, and send what was kept for it."""
        if self._addresses.get(rank) == address:
            return
        if (former := self._sockets.pop(rank, None)) is not None:
            _close(former, linger=0)
        self._addresses[rank] = address
        if 0 in (rank, self._rank):  # by these connections ranks are watched
            self._socket(rank)
        for frames in self._unsent.pop(rank, ()):
            self.send(rank, frames)

    def close(self, gone: set[int]) -> None:
        """Close all connections; what was sent last to a peer that is not among ``gone`` may still leave."""
        for rank, connection in self._sockets.items():
            _close(connection, linger=0 if rank in gone else _LINGER)
        # Only now: ZeroMQ waits for whoever reads the monitor of a socket, and would wait for ever.
        self._wake.send_multipart((b"",))
        self._wake.close()

    def _socket(self, to: int) -> Any:
        if to not in self._sockets:
            self._sockets[to] = self._connected(to, self._addresses[to])
        return self._sockets[to]

    def _connected(self, to: int, address: str) -> Any:
        socket = self._context.socket(zmq.DEALER)
        set_up(socket)
        socket.identity = str(self._rank).encode()
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = self._keys.public
        socket.heartbeat_ivl, socket.heartbeat_timeout = (int(1000 * seconds) for seconds in self._heartbeat)
        if 0 in (to, self._rank):
            self._monitors.put((to, address, socket.get_monitor_socket(_EVENTS)))
            self._wake.send_multipart((MONITOR,))
        socket.connect(address)
        socket.send_multipart((HELLO, self._hello))
        return socket


def set_up(socket: Any) -> None:
    """Give a socket what all sockets of the channel have: no limit on queued messages, and IPv6."""
    socket.linger, socket.sndhwm, socket.rcvhwm, socket.ipv6 = 0, 0, 0, True


def _close(socket: Any, linger: int) -> None:
    socket.disable_monitor()
    socket.close(linger)


# -- Where the ranks listen, and how they learn that of each other --


class Addresses:
    """The addresses that a rank knows. Belongs to the receiving thread."""

    # Rank 0 learns the address of each rank that connects to it, answers who asks for one, and passes all of
    # them on once it knows all. From then on nobody needs rank 0 to reach another rank.

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        send: Callable[[int, tuple[bytes, ...]], None],
        reached: Callable[[int, str], None],  # gets a peer and its address, where that is new
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._send, self._reached = send, reached
        self._known: dict[int, str] = {}
        self._asked: dict[int, set[int]] = defaultdict(set)

    @property
    def ranks(self) -> set[int]:
        """Peers whose address is known."""
        return set(self._known)

    def add(self, rank: int, address: str) -> None:
        """Note where a peer listens, and let those know who have asked."""
        if rank == self._rank or self._known.get(rank) == address:
            return
        self._known[rank] = address
        self._reached(rank, address)
        self._answer(rank)
        if self._rank == 0 and len(self._known) == self._world_size - 1 > 1:
            self._tell(self._known, self._known)

    def add_all(self, content: bytes) -> None:
        """Note the addresses that rank 0 has sent."""
        for rank, address in json.loads(content):
            self.add(int(rank), str(address))

    def asked(self, by: int, wanted: int) -> None:
        """Answer a rank that asks where another one listens; now, or once that is known."""
        self._asked[wanted].add(by)
        self._answer(wanted)

    def _answer(self, wanted: int) -> None:
        if wanted in self._known:
            self._tell(self._asked.pop(wanted, ()), (wanted,))

    def _tell(self, askers: Iterable[int], ranks: Iterable[int]) -> None:
        content = json.dumps([[rank, self._known[rank]] for rank in ranks]).encode()
        for asker in askers:
            self._send(asker, (ADDRESS, content))


def endpoint(host: str) -> str:
    """Return a host name or address as ZeroMQ takes it."""
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of a ZeroMQ address, without the brackets of IPv6."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


# -- Finds out what has become of a peer whose connection ended --
# ZeroMQ's own thread exchanges heartbeats, whatever Python does: a rank that holds the GIL for minutes, or stands in
# ``pdb``, keeps answering. When a connection ends nevertheless, asking the peer's port tells three things apart:
#
# =============== ===============================================================================================
# refused         nobody listens there any more: the process has ended
# accepted        the process is there and does not run: stopped (SIGSTOP, a debugger) or swapped out
# no answer       its host, or the network between, is gone
# =============== ===============================================================================================
#
# The first is a loss at once. The others may pass, and count only after ``silence_limit``.

# How often a peer that does not answer is asked, and how long one question takes at most [s]; a peer that is there, or
# whose host is gone, is asked less often once that has lasted.
_ASK_EVERY, _ASK_FOR, _ASK_AGAIN = 0.1, 0.3, 1.0
# So often in a row a connection is refused before that counts: a full queue of the listener refuses, too.
_REFUSALS = 2


@dataclass
class _Suspect:
    since: float
    ask_at: float = 0.0
    refused: int = 0
    reported: bool = False


class PeerWatch:
    """Watches the peers that a rank is connected to; all its methods belong to one thread."""

    def __init__(
        self,
        silence_limit: Callable[[], float],  # how long a peer may be frozen or unreachable [s]
        *,
        on_gone: Callable[[int, str], None],  # rank, reason; once: it has ended without closing its channel
        on_silent: Callable[[int, float, str], None],  # rank, seconds, reason; once: for longer than that
    ) -> None:
        self._silence_limit = silence_limit
        self._on_gone, self._on_silent = on_gone, on_silent
        self._addresses: dict[int, tuple[str, int]] = {}
        self._suspects: dict[int, _Suspect] = {}
        self._closed: set[int] = set()
        self._connected: set[int] = set()

    def add(self, rank: int, host: str, port: int) -> None:
        """Watch the connection to a peer that listens there."""
        self._addresses[rank] = (host, port)

    def connected(self, rank: int) -> None:
        """Note that the peer has answered."""
        self._suspects.pop(rank, None)
        self._connected.add(rank)

    def answers(self, rank: int) -> bool:
        """Return whether a peer answers heartbeats; one that is stopped does until their timeout. From any thread."""
        return rank in self._connected

    def disconnected(self, rank: int) -> None:
        self._connected.discard(rank)
        if rank not in self._closed:
            self._suspects.setdefault(rank, _Suspect(time.monotonic()))

    def closed(self, rank: int) -> None:
        """Note that the peer has closed its channel: what it does from now on is its own affair."""
        self._closed.add(rank)
        self._connected.discard(rank)
        self._suspects.pop(rank, None)

    @property
    def next_look(self) -> float | None:
        """Longest time until :meth:`look` is to be called [s]; ``None`` while every peer answers."""
        return _ASK_EVERY if self._suspects else None

    def look(self) -> None:
        """Ask the peers that do not answer."""
        now = time.monotonic()
        for rank, suspect in list(self._suspects.items()):
            if now >= suspect.ask_at:
                suspect.ask_at = now + _ASK_EVERY
                self._ask(rank, suspect)

    def _ask(self, rank: int, suspect: _Suspect) -> None:
        host, port = self._addresses[rank]
        try:
            socket.create_connection((host, port), timeout=_ASK_FOR).close()
        except ConnectionRefusedError:
            suspect.refused += 1
            if suspect.refused >= _REFUSALS:
                self.closed(rank)
                self._on_gone(rank, f"nobody listens at {host} port {port} any more")
            return
        except OSError as error:
            state = f"its host does not answer ({error.strerror or error})"
        else:
            state = "its process is there and does not run: it was stopped, or its host has no memory left"
        suspect.refused, seconds = 0, time.monotonic() - suspect.since
        if seconds > _ASK_AGAIN:  # a process that is being killed still answers for a moment
            suspect.ask_at = time.monotonic() + _ASK_AGAIN
        if seconds > self._silence_limit() and not suspect.reported:
            suspect.reported = True
            self._on_silent(rank, seconds, state)


# -- The thread that receives: it sleeps until a message comes, and passes it on --

_log = logging.getLogger(__name__)


class Receiver:
    """Listens on a port of its own, and watches the connections to peers."""

    def __init__(
        self,
        context: Any,
        rank: int,
        world_size: int,
        *,
        host: str,  # address of this host at which it listens
        known_as: str,  # how the others find that address
        keys: ChannelKeys,
        # Gets sender, kind, content; raises ValueError or TypeError for a message that makes no sense.
        take: Callable[[int, bytes, bytes], None],
        connected: Callable[[int], None],  # gets a rank whenever the connection to it stands
        watch: PeerWatch,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._pass_on, self._connected, self._watch = take, connected, watch
        self._inbox = context.socket(zmq.ROUTER)
        set_up(self._inbox)
        # A peer that connects again takes the place of its former connection.
        self._inbox.router_handover = True
        self._inbox.curve_server = True
        self._inbox.curve_publickey, self._inbox.curve_secretkey = keys
        self.address = f"{endpoint(known_as)}:{self._inbox.bind_to_random_port(endpoint(host))}"
        self._wake = context.socket(zmq.PULL)
        self._wake.bind(WAKE)
        # Takes (rank, address, monitor socket) of a connection that is to be watched.
        self.monitors: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="lockstep-receive", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait until the sending thread has ended it."""
        self._thread.join(timeout)

    def _run(self) -> None:
        poller, watched = zmq.Poller(), dict[Any, int]()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._ended:
                pause = self._watch.next_look
                for socket, _ in poller.poll(None if pause is None else int(1000 * pause)):
                    if socket is self._inbox:
                        identity, *frames = self._inbox.recv_multipart(copy=False)
                        self._take(sender_of(identity), *(frame.bytes for frame in frames))
                    elif socket is self._wake:
                        self._take_from_sender(poller, watched)
                    else:
                        self._note(watched[socket], recv_monitor_message(socket))
                self._watch.look()
        except zmq.ZMQError:
            _log.exception("the side channel cannot receive any more")
        finally:
            for socket in (*watched, self._inbox, self._wake):
                socket.close(0)

    def _take_from_sender(self, poller: Any, watched: dict[Any, int]) -> None:
        first, *rest = self._wake.recv_multipart()
        if first == MONITOR:
            rank, address, monitor = self.monitors.get()
            self._watch.add(rank, *host_and_port(address))
            watched[monitor] = rank
            poller.register(monitor, zmq.POLLIN)
        elif rest:  # posted to this rank itself
            self._take(str(self._rank).encode(), first, *rest)
        else:
            self._ended = True

    def _note(self, rank: int, event: Any) -> None:
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._watch.connected(rank)
            self._connected(rank)
        elif event["event"] == zmq.EVENT_DISCONNECTED:
            self._watch.disconnected(rank)

    def _take(self, identity: bytes, kind: bytes = b"", content: bytes = b"", *more: bytes) -> None:
        try:
            sender = int(identity)
            if more or not 0 <= sender < self._world_size:
                raise ValueError("it does not have the form of a message")
            self._pass_on(sender, kind, content)
        except (ValueError, TypeError) as error:
            _log.warning("ignored a malformed message on the side channel: %s", error)


def sender_of(identity: Any) -> bytes:
    """Return the identity under which a peer has connected, of the first frame of a message."""
    # Once it has connected again, ZeroMQ names its former connection by a number of its own that begins with
    # a zero byte; what has come by that connection is read all the same.
    name: bytes = identity.bytes
    return str(identity.get("Identity")).encode() if name.startswith(b"\0") else name
