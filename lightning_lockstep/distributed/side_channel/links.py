"""The connections by which a rank sends: one to each peer that it has something for."""

from __future__ import annotations

import json
import os
import queue
from collections import defaultdict, deque
from socket import gethostname
from typing import Any

import zmq

from lightning_lockstep.distributed.side_channel.job_token import ChannelKeys

__all__ = [
    "ADDRESS",
    "ARRIVED",
    "CLOSING",
    "FLUSH",
    "HELLO",
    "MONITOR",
    "POST",
    "WAKE",
    "WHERE",
    "Links",
    "set_up",
]

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
        for rank, socket in self._sockets.items():
            _close(socket, linger=0 if rank in gone else _LINGER)
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
