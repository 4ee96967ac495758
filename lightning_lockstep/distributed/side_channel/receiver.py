"""The thread that receives: it sleeps until a message comes, and passes it on."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_lockstep.distributed.side_channel.addresses import endpoint, host_and_port
from lightning_lockstep.distributed.side_channel.job_token import ChannelKeys
from lightning_lockstep.distributed.side_channel.links import MONITOR, WAKE, set_up
from lightning_lockstep.distributed.side_channel.peer_watch import PeerWatch

__all__ = ["Receiver", "sender_of"]

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
    """Return the identity under which a peer has connected, of the first frame of a message.

    Once it has connected again, ZeroMQ names its former connection by a number of its own that begins with a zero byte;
    what has come by that connection is read all the same.
    """
    name: bytes = identity.bytes
    return str(identity.get("Identity")).encode() if name.startswith(b"\0") else name
