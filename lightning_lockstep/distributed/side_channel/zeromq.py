"""The side channel over ZeroMQ, and the thread that sends."""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq

from lightning_lockstep.distributed.rendezvous import ChannelKeys
from lightning_lockstep.distributed.side_channel.channel import Message, Post, SideChannel, receivers_of
from lightning_lockstep.distributed.side_channel.connections import (
    ADDRESS,
    ARRIVED,
    CLOSING,
    FLUSH,
    HELLO,
    POST,
    WHERE,
    Addresses,
    Links,
    PeerWatch,
    Receiver,
)

# -- The thread that sends what a rank has posted --

_encode = json.JSONEncoder(default=str).encode
_log = logging.getLogger(__name__)


class Frames(NamedTuple):
    """A message of the channel itself, to be sent as it is."""

    to: int
    frames: tuple[bytes, ...]


class Reached(NamedTuple):
    """Where a peer listens."""

    rank: int
    address: str


@dataclass
class Flush:
    """Asks every peer that was sent something to confirm it."""

    number: int
    missing: set[int] | None = None  # peers that have not confirmed yet; None until they are asked
    done: threading.Event = field(default_factory=threading.Event)  # all have

    def confirmed(self, rank: int) -> None:
        """Note that a peer has confirmed, or never will."""
        if self.missing is not None:
            self.missing.discard(rank)
            if not self.missing:
                self.done.set()


class Sender:
    """Takes what was posted, turns it into JSON and hands it to ZeroMQ, all on a thread of its own."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        links: Callable[[], Links],  # makes the connections, on that thread
        gone: Callable[[], set[int]],  # peers that have closed their channel or are lost
    ) -> None:
        self._rank, self._world_size, self._links, self._gone = rank, world_size, links, gone
        self._outbox: queue.SimpleQueue[Post | Frames | Reached | Flush | None] = queue.SimpleQueue()
        self.put = self._outbox.put  # returns at once
        self._thread = threading.Thread(target=self._run, name="lockstep-send", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self, timeout: float) -> None:
        """Send what is left, close the connections and end the receiving thread."""
        self._outbox.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        _yield_to_caller()
        links = self._links()
        try:
            while (item := self._outbox.get()) is not None:
                if isinstance(item, Post):
                    self._push(item, links)
                elif isinstance(item, Frames):
                    links.send(*item)
                elif isinstance(item, Reached):
                    links.reached(*item)
                else:
                    self._ask_for_arrival(item, links)
        except zmq.ZMQError:
            _log.exception("the side channel cannot send any more")
        finally:
            links.close(self._gone())

    def _push(self, post: Post, links: Links) -> None:
        topic, body, to, make = post
        try:
            content = _encode([topic, body if make is None else make(body)]).encode()
        except Exception:
            # One message that cannot be sent must not silence the channel for all others.
            _log.exception("a message of the side channel topic %r cannot be sent", topic)
            return
        for receiver in receivers_of(to, self._rank, self._world_size):
            links.send(receiver, (POST, content))

    def _ask_for_arrival(self, flush: Flush, links: Links) -> None:
        asked = links.used - self._gone()
        flush.missing = set(asked)
        if not asked:
            flush.done.set()
        for rank in asked:
            links.send(rank, (FLUSH, str(flush.number).encode()))


def _yield_to_caller() -> None:
    """Keep this thread from taking the core of the one that has woken it."""
    # A scheduling class of Linux that changes nothing else: what is posted goes out as soon as a core is
    # free.
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# -- The side channel over ZeroMQ: every rank listens on a port of its own and connects to the peers it
# sends to
# The store of the group brings the address of rank 0 alone. A rank that connects to another one begins with its own
# address, so rank 0 comes to know all of them and passes them on. From then on two ranks need neither rank 0 nor the
# store to reach each other.
#
# Two threads do everything. The sending one takes what was posted, turns it into JSON and hands it to ZeroMQ; it
# alone uses the sockets that lead out. The receiving one sleeps until a message comes, and calls the handlers.
# Nobody polls, and a post returns at once. Heartbeats, reconnection, authentication and encryption are ZeroMQ's
# (ZMTP 3.1 with CURVE), on a thread that needs no GIL.
#
# Frames of a message: what it is, then JSON.
#
# =========== ==================================================================
# ``hello``   the sender's address, host name and process id; the first message of a connection
# ``post``    topic and body
# ``where``   asks rank 0 for the address of a rank
# ``address`` ranks and their addresses; once rank 0 knows all, it sends them to all
# ``flush``   asks for ``arrived`` with the same number
# ``arrived`` everything up to that flush has arrived
# ``closing`` the sender has closed its channel
# =========== ==================================================================

_CLAIM, _CLAIMED = "lockstep/claim", "lockstep/claimed"
# How long a rank waits for rank 0's answer to a claim [s].
_CLAIM_FOR = 3.0
# Contexts of channels whose end took too long: collected as garbage, one would wait for its sockets for ever.
_unfinished: list[Any] = []


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
        self._closing = False
        self._process = os.getpid()
        self._processes: dict[int, tuple[str, int]] = {}
        self._closed_ranks: set[int] = set()
        self._lost_ranks: set[int] = set()
        self._all_closed, self._main_reached = threading.Event(), threading.Event()
        self._numbers = itertools.count()
        self._flushes: dict[int, Flush] = {}
        self._claims: dict[str, str] = {}
        self._claimed = threading.Condition()
        self.on(_CLAIM, self._take_claim)
        self.on(_CLAIMED, self._take_claimed)
        self._watch = PeerWatch(lambda: self.silence_limit, on_gone=self._gone, on_silent=self._silent)
        self._context = zmq.Context()
        self._receiver = Receiver(
            self._context,
            rank,
            world_size,
            host=host,
            known_as=known_as or host,
            keys=keys,
            take=self._take,
            connected=self._connected,
            watch=self._watch,
        )
        self.address = self._receiver.address
        self.port = int(self.address.rpartition(":")[2])
        self._sender = Sender(
            rank,
            world_size,
            links=lambda: Links(
                self._context,
                rank,
                self.address,
                keys,
                (heartbeat_interval, heartbeat_timeout),
                self._receiver.monitors,
            ),
            gone=lambda: self._closed_ranks | self._lost_ranks,
        )
        self._addresses = Addresses(
            rank,
            world_size,
            send=lambda to, frames: self._sender.put(Frames(to, frames)),
            reached=lambda peer, address: self._sender.put(Reached(peer, address)),
        )
        if main_address is not None:
            self._addresses.add(0, main_address)
        self._receiver.start()

    @property
    def usable(self) -> bool:
        """See :attr:`SideChannel.usable`."""
        return not (self._closing or 0 in self._closed_ranks or 0 in self._lost_ranks)

    @property
    def lost(self) -> bool:
        """See :attr:`SideChannel.lost`."""
        return 0 in self._lost_ranks and not self._closing

    def process_of(self, rank: int) -> tuple[str, int]:
        """See :meth:`SideChannel.process_of`."""
        return self._processes.get(rank) or super().process_of(rank)

    def has_closed(self, rank: int) -> bool:
        """See :meth:`SideChannel.has_closed`."""
        return rank in self._closed_ranks

    def answers(self, rank: int) -> bool:
        """See :meth:`SideChannel.answers`."""
        return self._watch.answers(rank)

    def _put(self, post: Post) -> None:
        self._sender.put(post)

    def poster(self, topic: str, *, to: int, make: Callable[[Any], Any]) -> Callable[[Any], None]:
        """See :meth:`SideChannel.poster`."""
        put = self._sender.put
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
        if not self._sender.alive or self._process != os.getpid():
            return False
        flush = Flush(next(self._numbers))
        self._flushes[flush.number] = flush
        self._sender.put(flush)
        try:
            return flush.done.wait(timeout)
        finally:
            self._flushes.pop(flush.number, None)

    def wait_for_main(self, timeout: float) -> bool:
        """Wait until the connection to rank 0 stands; return whether it does.

        Args:
            timeout: Longest wait [s].

        Ranks: any rank but rank 0, for itself.
        """
        return self._main_reached.wait(timeout)

    def close(self, timeout: float = 2.0) -> None:
        """See :meth:`SideChannel.close`."""
        if self._closing or self._process != os.getpid():
            return
        self._begins_to_close()
        if self.rank == 0 and timeout:
            self._all_closed.wait(timeout)
        self._closing = True
        for receiver in self._addresses.ranks - self._closed_ranks - self._lost_ranks:
            self._sender.put(Frames(receiver, (CLOSING,)))
        self.flush(timeout)
        self._sender.end(max(timeout, 0.5))
        self._receiver.join(max(timeout, 0.5))
        if not (self._sender.alive or self._receiver.alive):
            # It waits for what was sent last to leave; a thread of its own keeps that wait bounded in any case.
            ending = threading.Thread(target=self._context.term, name="lockstep-term", daemon=True)
            ending.start()
            ending.join(max(timeout, 1.0))
        if not self._context.closed:
            _unfinished.append(self._context)
        self._closed()

    # ---------------------------------------------------------------- on the receiving thread

    def _take(self, sender: int, kind: bytes, content: bytes) -> None:
        if kind == POST:
            topic, body = json.loads(content)
            self._deliver(Message(topic, sender, body))
        elif kind == HELLO:
            address, host, pid = json.loads(content)
            self._processes[sender] = str(host), int(pid)
            self._addresses.add(sender, str(address))
        elif kind == ADDRESS:
            self._addresses.add_all(content)
        elif kind == WHERE:
            self._addresses.asked(sender, int(content))
        elif kind == FLUSH:
            self._sender.put(Frames(sender, (ARRIVED, content)))
        elif kind == ARRIVED:
            if (flush := self._flushes.get(int(content))) is not None:
                flush.confirmed(sender)
        elif kind == CLOSING:
            self._closed_ranks.add(sender)
            self._watch.closed(sender)
            self._forget(sender)
        else:
            raise ValueError(f"its kind is {kind[:20]!r}")

    def _connected(self, rank: int) -> None:
        if rank == 0:
            self._main_reached.set()

    def _forget(self, rank: int) -> None:
        """Wait for nothing more from a peer that is closed or gone."""
        for flush in tuple(self._flushes.values()):
            flush.confirmed(rank)
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
