"""The side channel over ZeroMQ: every rank listens on a port of its own and connects to the peers it sends to.

The store of the group brings the address of rank 0 alone. A rank that connects to another one begins with its own
address, so rank 0 comes to know all of them and passes them on. From then on two ranks need neither rank 0 nor the
store to reach each other.

Two threads do everything. The sending one takes what was posted, turns it into JSON and hands it to ZeroMQ; it
alone uses the sockets that lead out. The receiving one sleeps until a message comes, and calls the handlers.
Nobody polls, and a post returns at once. Heartbeats, reconnection, authentication and encryption are ZeroMQ's
(ZMTP 3.1 with CURVE), on a thread that needs no GIL.

Frames of a message: what it is, then JSON.

=========== ==================================================================
``hello``   the sender's address; the first message of a connection
``post``    topic and body
``where``   asks rank 0 for the address of a rank
``address`` ranks and their addresses; once rank 0 knows all, it sends them to all
``flush``   asks for ``arrived`` with the same number
``arrived`` everything up to that flush has arrived
``closing`` the sender has closed its channel
=========== ==================================================================
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_lockstep.distributed.side_channel.base import Message, Post, SideChannel, receivers_of
from lightning_lockstep.distributed.side_channel.job_token import ChannelKeys
from lightning_lockstep.distributed.side_channel.links import (
    ADDRESS,
    ARRIVED,
    CLOSING,
    FLUSH,
    HELLO,
    MONITOR,
    POST,
    WAKE,
    WHERE,
    Links,
    set_up,
)
from lightning_lockstep.distributed.side_channel.peer_watch import PeerWatch

__all__ = ["ZeroMQSideChannel"]

_CLAIM, _CLAIMED = "lockstep/claim", "lockstep/claimed"
# How long a rank waits for rank 0's answer to a claim [s].
_CLAIM_FOR = 3.0
# Contexts of channels whose end took too long: collected as garbage, one would wait for its sockets for ever.
_unfinished: list[Any] = []

_encode = json.JSONEncoder(default=str).encode
_log = logging.getLogger(__name__)


class _Frames(NamedTuple):
    """A message of the channel itself, to be sent as it is."""

    to: int
    frames: tuple[bytes, ...]


class _Reached(NamedTuple):
    """Where a peer listens."""

    rank: int
    address: str


class _Flush(NamedTuple):
    """Asks every peer that was sent something to confirm it."""

    number: int


class ZeroMQSideChannel(SideChannel):
    """The side channel of a run with several ranks.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        host: Address of this host at which it listens.
        known_as: How the others find that address; by default by itself.
        keys: Keys of this job.
        main_address: Address of rank 0's channel; ``None`` on rank 0.
        heartbeat_interval: Time between two heartbeats of a connection [s].
        heartbeat_timeout: Age of the last heartbeat at which a connection counts as ended [s].
        silence_limit: How long a peer may be frozen or unreachable [s].
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        host: str,
        keys: ChannelKeys,
        known_as: str | None = None,
        main_address: str | None = None,
        heartbeat_interval: float = 5.0,
        heartbeat_timeout: float = 20.0,
        silence_limit: float = 120.0,
    ) -> None:
        super().__init__(rank, world_size)
        self.silence_limit = silence_limit
        self._keys, self._heartbeat = keys, (heartbeat_interval, heartbeat_timeout)
        self._outbox: queue.SimpleQueue[Post | _Frames | _Reached | _Flush | None] = queue.SimpleQueue()
        self._closing = False
        self._process = os.getpid()
        self._closed_ranks: set[int] = set()
        self._lost_ranks: set[int] = set()
        self._all_closed, self._main_reached = threading.Event(), threading.Event()
        self._numbers = itertools.count()
        self._flushes: dict[int, tuple[set[int], threading.Event]] = {}
        self._claims: dict[str, str] = {}
        self._claimed = threading.Condition()
        self._watch = PeerWatch(lambda: self.silence_limit, on_gone=self._gone, on_silent=self._silent)
        self._context = zmq.Context()
        self._inbox = self._listen(host, known_as or host)
        self._wake = self._context.socket(zmq.PULL)
        self._wake.bind(WAKE)
        self._monitors: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        # Of the receiving thread: where peers listen, and who has asked for the address of which.
        self._known: dict[int, str] = {}
        self._asked: dict[int, set[int]] = defaultdict(set)
        self.on(_CLAIM, self._take_claim)
        self.on(_CLAIMED, self._take_claimed)
        if main_address is not None:
            self.main_host = _split(main_address)[0]
            self._reached(0, main_address)
        else:
            self.main_host = known_as or host
        self._sender = threading.Thread(target=self._send_loop, name="lockstep-send", daemon=True)
        self._receiver = threading.Thread(target=self._receive_loop, name="lockstep-receive", daemon=True)
        self._sender.start()
        self._receiver.start()

    # ---------------------------------------------------------------- for any thread

    @property
    def usable(self) -> bool:
        """See :attr:`SideChannel.usable`."""
        return not (self._closing or 0 in self._closed_ranks or 0 in self._lost_ranks)

    @property
    def lost(self) -> bool:
        """See :attr:`SideChannel.lost`."""
        return 0 in self._lost_ranks and not self._closing

    def _put(self, post: Post) -> None:
        self._outbox.put(post)

    def poster(self, topic: str, *, to: int, make: Callable[[Any], Any]) -> Callable[[Any], None]:
        """See :meth:`SideChannel.poster`."""
        put = self._outbox.put
        return lambda body: put(Post(topic, body, to, make))

    def claim(self, key: str, value: str) -> str:
        """See :meth:`SideChannel.claim`; when rank 0 does not answer, the caller's own value stands."""
        if self.rank == 0:
            with self._claimed:
                return self._claims.setdefault(key, value)
        self.post(_CLAIM, [key, value], to=0)
        with self._claimed:
            self.wait_for(self._claimed, lambda: key in self._claims, _CLAIM_FOR)
            return self._claims.setdefault(key, value)

    def flush(self, timeout: float = 5.0) -> bool:
        """See :meth:`SideChannel.flush`; a message has left when its receiver has it."""
        if not self._sender.is_alive() or self._process != os.getpid():
            return False
        number, done = next(self._numbers), threading.Event()
        self._flushes[number] = (set(), done)
        self._outbox.put(_Flush(number))
        try:
            return done.wait(timeout)
        finally:
            self._flushes.pop(number, None)

    def wait_for_main(self, timeout: float) -> bool:
        """Wait until the connection to rank 0 stands; return whether it does.

        Args:
            timeout: Longest wait [s].

        Ranks: any but rank 0, for itself.
        """
        return self._main_reached.wait(timeout)

    def close(self, timeout: float = 2.0) -> None:
        """See :meth:`SideChannel.close`."""
        if self._closing or self._process != os.getpid():
            return
        if self.rank == 0 and timeout:
            self._all_closed.wait(timeout)
        self._closing = True
        for receiver in set(self._known) - self._closed_ranks - self._lost_ranks:
            self._outbox.put(_Frames(receiver, (CLOSING,)))
        self.flush(timeout)
        self._outbox.put(None)
        self._sender.join(max(timeout, 0.5))
        self._receiver.join(max(timeout, 0.5))
        if not (self._sender.is_alive() or self._receiver.is_alive()):
            # It waits for what was sent last to leave; a thread of its own keeps that wait bounded in any case.
            ending = threading.Thread(target=self._context.term, name="lockstep-term", daemon=True)
            ending.start()
            ending.join(max(timeout, 1.0))
        if not self._context.closed:
            _unfinished.append(self._context)
        self._closed()

    # ---------------------------------------------------------------- sending thread

    def _send_loop(self) -> None:
        _yield_to_caller()
        links = Links(self._context, self.rank, self.address, self._keys, self._heartbeat, self._monitors)
        try:
            while (item := self._outbox.get()) is not None:
                if isinstance(item, Post):
                    self._push(item, links)
                elif isinstance(item, _Frames):
                    links.send(*item)
                elif isinstance(item, _Reached):
                    links.reached(*item)
                else:
                    self._ask_for_arrival(item, links)
        except zmq.ZMQError:
            _log.exception("the side channel cannot send any more")
        finally:
            links.close(self._closed_ranks | self._lost_ranks)

    def _push(self, post: Post, links: Links) -> None:
        topic, body, to, make = post
        try:
            content = _encode([topic, body if make is None else make(body)]).encode()
        except Exception:
            # One message that cannot be sent must not silence the channel for all others.
            _log.exception("a message of the side channel topic %r cannot be sent", topic)
            return
        for receiver in receivers_of(to, self.rank, self.world_size):
            links.send(receiver, (POST, content))

    def _ask_for_arrival(self, flush: _Flush, links: Links) -> None:
        missing, done = self._flushes.get(flush.number, (set(), threading.Event()))
        missing |= links.used - self._closed_ranks - self._lost_ranks
        if not missing:
            done.set()
        for rank in tuple(missing):
            links.send(rank, (FLUSH, str(flush.number).encode()))

    # ---------------------------------------------------------------- receiving thread

    def _receive_loop(self) -> None:
        poller, monitors = zmq.Poller(), dict[Any, int]()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        ended = False
        try:
            while not ended:
                pause = self._watch.next_look
                for socket, _ in poller.poll(None if pause is None else int(1000 * pause)):
                    if socket is self._inbox:
                        self._take(*self._inbox.recv_multipart())
                    elif socket is self._wake:
                        first, *rest = self._wake.recv_multipart()
                        if first == MONITOR:
                            rank, address, monitor = self._monitors.get()
                            self._watch.add(rank, *_split(address))
                            monitors[monitor] = rank
                            poller.register(monitor, zmq.POLLIN)
                        elif rest:
                            self._take(str(self.rank).encode(), first, *rest)
                        else:
                            ended = True
                    else:
                        self._note(monitors[socket], recv_monitor_message(socket))
                self._watch.look()
        except zmq.ZMQError:
            _log.exception("the side channel cannot receive any more")
        finally:
            for monitor in monitors:
                monitor.close(0)
            self._inbox.close(0)
            self._wake.close(0)

    def _note(self, rank: int, event: Any) -> None:
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._watch.connected(rank)
            if rank == 0:
                self._main_reached.set()
        elif event["event"] == zmq.EVENT_DISCONNECTED:
            self._watch.disconnected(rank)

    def _take(self, identity: bytes, kind: bytes = b"", content: bytes = b"", *more: bytes) -> None:
        try:
            sender = int(identity)
            if more or not 0 <= sender < self.world_size:
                raise ValueError("it does not have the form of a message")
            if kind == POST:
                topic, body = json.loads(content)
                self._deliver(Message(topic, sender, body))
            else:
                self._take_own(sender, kind, content)
        except (ValueError, TypeError) as error:
            _log.warning("a message of the side channel cannot be read and is left out: %s", error)

    def _take_own(self, sender: int, kind: bytes, content: bytes) -> None:
        if kind == HELLO:
            self._reached(sender, content.decode())
        elif kind == ADDRESS:
            for rank, address in json.loads(content):
                self._reached(int(rank), str(address))
        elif kind == WHERE:
            wanted = int(content)
            self._asked[wanted].add(sender)
            self._tell_where(wanted)
        elif kind == FLUSH:
            self._outbox.put(_Frames(sender, (ARRIVED, content)))
        elif kind == ARRIVED:
            self._arrived(sender, int(content))
        elif kind == CLOSING:
            self._closed_ranks.add(sender)
            self._watch.closed(sender)
            self._forget(sender)
        else:
            raise ValueError(f"its kind is {kind[:20]!r}")

    def _reached(self, rank: int, address: str) -> None:
        if rank == self.rank or self._known.get(rank) == address:
            return
        self._known[rank] = address
        self._outbox.put(_Reached(rank, address))
        self._tell_where(rank)
        if self.rank == 0 and len(self._known) == self.world_size - 1 > 1:
            self._tell(self._known, self._known)  # from now on nobody needs rank 0 to reach another

    def _tell_where(self, rank: int) -> None:
        if rank in self._known:
            self._tell(self._asked.pop(rank, ()), (rank,))

    def _tell(self, askers: Iterable[int], ranks: Iterable[int]) -> None:
        content = _encode([[rank, self._known[rank]] for rank in ranks]).encode()
        for asker in askers:
            self._outbox.put(_Frames(asker, (ADDRESS, content)))

    def _arrived(self, sender: int, number: int) -> None:
        missing, done = self._flushes.get(number, (set(), None))
        missing.discard(sender)
        if done is not None and not missing:
            done.set()

    def _forget(self, rank: int) -> None:
        """Wait for nothing more from a peer that is closed or gone."""
        for number in tuple(self._flushes):
            self._arrived(rank, number)
        if len(self._closed_ranks | self._lost_ranks) >= self.world_size - 1:
            self._all_closed.set()

    def _gone(self, rank: int, reason: str) -> None:
        if not self._closing:
            self._lost_ranks.add(rank)
            self._forget(rank)
            if self._on_lost is not None:
                self._on_lost(rank, reason)

    def _silent(self, rank: int, seconds: float, reason: str) -> None:
        if not self._closing and self._on_silent is not None:
            self._on_silent(rank, seconds, reason)

    def _take_claim(self, message: Message) -> None:
        key, value = message.body
        with self._claimed:
            winner = self._claims.setdefault(key, value)
        self.post(_CLAIMED, [key, winner], to=message.sender)

    def _take_claimed(self, message: Message) -> None:
        key, value = message.body
        with self._claimed:
            self._claims.setdefault(key, value)
            self._claimed.notify_all()

    # ---------------------------------------------------------------- sockets

    def _listen(self, host: str, known_as: str) -> Any:
        inbox = self._context.socket(zmq.ROUTER)
        set_up(inbox)
        inbox.router_handover = True  # a peer that connects again takes the place of its former connection
        inbox.curve_server = True
        inbox.curve_publickey, inbox.curve_secretkey = self._keys
        port = inbox.bind_to_random_port(_endpoint(host))
        self.address = f"{_endpoint(known_as)}:{port}"
        return inbox


def _endpoint(host: str) -> str:
    """Return a host name or address as ZeroMQ takes it."""
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _yield_to_caller() -> None:
    """Keep this thread from taking the core of the one that has woken it.

    A scheduling class of Linux that changes nothing else: what is posted goes out as soon as a core is free.
    """
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
