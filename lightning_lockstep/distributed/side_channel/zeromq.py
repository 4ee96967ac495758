"""The side channel over ZeroMQ: a star. Rank 0 listens and routes, every other rank has one connection, to rank 0.

=========== ====================== ===================================================================================
frame 1     frame 3                what it says
=========== ====================== ===================================================================================
``hello``   host, process id       first message of a connection, in both directions
``post``    topic and body         frame 2 names its receivers on the way to rank 0 (none: all others), and its sender
                                   on the way from there
``flush``   a number               asks for ``arrived`` with that number
``arrived`` that number            the handlers have had all that came before the flush; rank 0 has also passed on what
                                   was for others
``closing``                        its sender has closed its channel
=========== ====================== ===================================================================================

Frame 3 is JSON. Rank 0 passes a post on without reading it. Who has sent a message to rank 0 is told by its
connection, not by a frame. Messages from one rank to another keep their order.

Two threads do everything. One owns the sockets: it turns what was posted into JSON, sends, receives and routes. The
other one calls the handlers, so that one that blocks (rank 0 prints log lines in one) keeps nothing from being routed.
A post returns at once. Heartbeats, reconnection, authentication and encryption are ZeroMQ's (ZMTP 3.1 with CURVE), on a
thread in C that needs no GIL: a rank that holds the GIL for minutes, or stands in ``pdb``, keeps answering.

A rank is lost if its connection has ended (its process did, or no heartbeat came for the silence limit) and it neither
says goodbye nor connects again within two seconds.

For more than a few thousand ranks a tree would do: the first rank of each node listens, too, and where `_route` finds a
receiver on another node, it sends the post up.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import logging
import os
import queue
import resource
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_lockstep.distributed.rendezvous import ChannelKeys
from lightning_lockstep.distributed.side_channel.channel import (
    BACK_WITHIN,
    Message,
    Post,
    SideChannel,
    receivers_of,
)
from lightning_lockstep.errors import LaunchError

HELLO, POST, FLUSH, ARRIVED, CLOSING = b"hello", b"post", b"flush", b"arrived", b"closing"
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
# Messages for a rank that is not connected yet, or not at the moment; older ones are dropped beyond this number.
_KEPT_UNSENT = 10_000
# Descriptors of rank 0 on top of those that are open and its connections: files, loaders, process groups.
_SPARE_DESCRIPTORS = 200
# How many messages are received before those are sent that were posted here meanwhile.
_RECEIVED_AT_ONCE = 100
# How long what was sent last may still take to leave when the connection is closed [ms].
_LINGER = 1000
# How often the sockets' thread looks at ranks whose connection has ended [s].
_LOOK_AT_ABSENT = 0.1
# How long the handlers may take over what a rank has sent before it ended [s].
_HANDLED_FOR = 1.0
# How often a heartbeat is sent at most [s].
_HEARTBEAT_EVERY = 5.0
# Contexts of channels whose end took too long: collected as garbage, one would wait for its sockets forever.
_unfinished: list[Any] = []

_log = logging.getLogger(__name__)
_encode = json.JSONEncoder(default=str).encode
_Work = Callable[[], None]


class ZeroMQSideChannel(SideChannel):
    """The side channel of a run with several ranks."""

    # `host`: where rank 0 listens. `known_as`: how the others find it. `main_address`: of rank 0's channel; rank 0 has
    # none. `silence_limit`: how long a peer may be stopped or unreachable before its connection counts as ended [s].

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        keys: ChannelKeys,
        host: str = "127.0.0.1",
        known_as: str | None = None,
        main_address: str | None = None,
        silence_limit: float = 120.0,
    ) -> None:
        super().__init__(rank, world_size)
        self._process = os.getpid()
        self._numbers = itertools.count()
        self._unconfirmed: dict[int, set[int]] = {}  # ranks that each flush waits for, once they are asked
        self._outbox: deque[Post | _Work] = deque()  # for the thread that owns the sockets
        self._arrived: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()  # for the one of the handlers
        self._asleep = self._ended = False
        # Of the thread that owns the sockets; others only look.
        self._used: set[int] = set()  # ranks that were sent something
        self._unsent: dict[int, deque[tuple[Any, ...]]] = defaultdict(lambda: deque(maxlen=_KEPT_UNSENT))
        self._connections: dict[int, int | None] = {}  # on rank 0: descriptor -> rank that has said hello
        self._standing: set[int] = set()  # ranks whose connection stands
        self._left: set[int] = set()  # ranks that have closed their channel: what they do is their own affair
        self._absent: dict[int, float] = {}  # ranks whose connection has ended -> until when they may be back
        self._lost_soon: set[int] = set()  # those that are lost once the handlers have had what they sent

        reads, writes = os.pipe()  # of all that can be polled, nearly the cheapest to the poster
        os.set_blocking(writes, False)
        self._woken, self._wakes = io.FileIO(reads, "rb"), io.FileIO(writes, "wb")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if rank == 0 else zmq.DEALER)
        self._socket.linger, self._socket.sndhwm, self._socket.rcvhwm, self._socket.ipv6 = 0, 0, 0, True
        self._socket.heartbeat_ivl = int(1000 * min(_HEARTBEAT_EVERY, silence_limit / 4))
        self._socket.heartbeat_timeout = min(int(1000 * silence_limit), 2**31 - 1)
        self._hello = _encode([socket.gethostname(), os.getpid()]).encode()
        self._monitor = self._context.socket(zmq.PAIR)
        # Without a limit: at one, ZeroMQ's own thread would wait for the reader, and keep no heartbeat.
        self._monitor.linger = self._monitor.rcvhwm = 0
        self._socket.monitor("inproc://monitor", _WATCHED)
        self._monitor.connect("inproc://monitor")
        if main_address is None:
            self._listen(host, known_as or host, keys)
        else:
            self._connect(main_address, keys)
        self._sockets = threading.Thread(target=self._run_sockets, name="lockstep-channel", daemon=True)
        self._calls = threading.Thread(target=self._call_handlers, name="lockstep-handlers", daemon=True)
        self._sockets.start()
        self._calls.start()

    def _listen(self, host: str, known_as: str, keys: ChannelKeys) -> None:
        # A rank that connects again takes the place of its former connection; to send to one that is not there fails.
        self._socket.router_handover = self._socket.router_mandatory = True
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        need_descriptors(self.world_size)
        self._socket.backlog = max(100, self.world_size)  # they all come at once
        self.port = self._socket.bind_to_random_port(_endpoint(host))
        self.address = f"{_endpoint(known_as)}:{self.port}"

    def _connect(self, main_address: str, keys: ChannelKeys) -> None:
        self._socket.identity = str(self.rank).encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_serverkey = keys.public
        self.port = int(main_address.rpartition(":")[2])
        self._socket.connect(main_address)

    def answers(self, rank: int) -> bool:
        """See :meth:`SideChannel.answers`; a rank that is stopped does until the silence limit."""
        return rank in self._standing

    def _put(self, item: Post | _Work) -> None:
        self._outbox.append(item)
        # In this order: the other thread says that it falls asleep before it looks into the outbox.
        if self._asleep:
            with suppress(OSError, ValueError):  # it has ended meanwhile
                # Nothing between these two: an exception of a signal would leave the other thread asleep.
                self._asleep = False
                self._wakes.write(b"\0")

    def flush(self, timeout: float = 5.0) -> bool:
        """See :meth:`SideChannel.flush`."""
        if not self._sockets.is_alive() or self._process != os.getpid():
            return False
        number = next(self._numbers)
        self._put(partial(self._ask_for_arrival, number))
        with self._news:
            arrived = self._news.wait_for(lambda: self._has_arrived(number), timeout)
            self._unconfirmed.pop(number, None)
            return arrived

    def _has_arrived(self, number: int) -> bool:
        return number in self._unconfirmed and self._unconfirmed[number] <= self._ended_ranks

    def wait_for_main(self, timeout: float) -> bool:
        """Wait until the connection to rank 0 stands; return whether it does. Ranks: any but rank 0, alone."""
        with self._news:
            return self._news.wait_for(lambda: self.answers(0), timeout)

    def close(self, timeout: float = 2.0) -> None:
        """See :meth:`SideChannel.close`."""
        if self._closing or self._process != os.getpid():
            return
        self._begins_to_close()
        if self.rank == 0 and timeout:
            with self._news:
                # One whose connection has ended is not waited for, though it might come back.
                self._news.wait_for(
                    lambda: len(self._ended_ranks.union(self._absent)) >= self.world_size - 1, timeout
                )
        self._closing = True
        self._put(self._say_goodbye)
        self.flush(timeout)
        self._put(self._end)
        # Its last act waits for what was sent last to leave. Not on a thread made for that: Python 3.12 and later start
        # none at exit.
        self._sockets.join(max(timeout, 0.5) + max(timeout, 1.0))
        self._arrived.put(None)
        self._calls.join(max(timeout, 0.5))
        if not self._context.closed:
            _unfinished.append(self._context)
        self._closed()

    # ---------------------------------------------------------------- the thread that owns the sockets: sending

    def _run_sockets(self) -> None:
        _yield_to_poster()
        poller = zmq.Poller()
        for one in (self._socket, self._monitor, self._woken):
            poller.register(one, zmq.POLLIN)
        try:
            while not self._ended:
                self._asleep = True
                at_most = int(1000 * _LOOK_AT_ABSENT) if self._absent else None
                ready = dict(poller.poll(0 if self._outbox else at_most))
                self._asleep = False
                if self._woken.fileno() in ready:
                    self._woken.read(4096)
                self._send_posted()
                self._receive()
                self._look_at_absent()
        except zmq.ZMQError:
            _log.exception("the side channel can neither send nor receive any more")
        finally:
            self._asleep = False
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(_LINGER)
            self._wakes.close()
            self._woken.close()
            self._context.term()

    def _send_posted(self) -> None:
        for _ in range(len(self._outbox)):
            item = self._outbox.popleft()
            if isinstance(item, Post):
                self._send_post(*item)
            else:
                item()

    def _send_post(
        self, topic: str, body: Any, to: int | tuple[int, ...] | None, make: Callable[[Any], Any] | None
    ) -> None:
        try:
            content = _encode([topic, body if make is None else make(body)]).encode()
        except Exception:
            # One message that cannot be sent must not silence the channel for all others.
            _log.exception("a message of the side channel topic %r cannot be sent", topic)
            return
        if self.rank == 0:
            self._route(0, to, zmq.Frame(content, copy=True))  # copied once, however many get it
            return
        named = () if to is None else receivers_of(to, self.rank, self.world_size)
        others = ",".join(str(rank) for rank in named if rank != self.rank)
        if self.rank in named:
            self._read_soon(self.rank, content)
        if to is None or others:
            self._send(0, POST, others.encode(), content)

    def _route(self, sender: int, to: int | tuple[int, ...] | None, content: zmq.Frame) -> None:
        """On rank 0: bring a post to its receivers."""
        for rank in receivers_of(to, sender, self.world_size):
            if rank == 0:
                self._read_soon(sender, content.bytes)
            else:
                self._send(rank, POST, str(sender).encode(), content)

    def _send(self, to: int, kind: bytes, about: bytes = b"", content: Any = b"") -> None:
        if self.rank != 0:
            self._used.add(to)
            self._socket.send_multipart((kind, about, content))
        elif to in self._unsent:
            self._unsent[to].append((kind, about, content))  # behind what waits already
        else:
            try:
                self._socket.send_multipart((str(to).encode(), kind, about, content), copy=False)
                self._used.add(to)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                if to not in self._ended_ranks:
                    self._unsent[to].append((kind, about, content))

    def _ask_for_arrival(self, number: int) -> None:
        asked = self._used - self._ended_ranks
        with self._news:
            self._unconfirmed[number] = asked.copy()
            self._news.notify_all()
        for rank in asked:
            self._send(rank, FLUSH, content=str(number).encode())

    def _say_goodbye(self) -> None:
        for rank in {0} if self.rank != 0 else self._standing - self._ended_ranks:
            self._send(rank, CLOSING)

    def _end(self) -> None:
        self._ended = True

    # ---------------------------------------------------------------- the thread that owns the sockets: receiving

    def _receive(self) -> None:
        self._read_monitor()
        for _ in range(_RECEIVED_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._take(*frames)
            except (ValueError, TypeError) as error:
                self._arrived.put(partial(_say_malformed, error))

    def _take(self, *frames: Any) -> None:
        """Take a message that has come; raise ValueError or TypeError if it makes no sense."""
        *connection, kind_, about_, content = frames
        kind, about = kind_.bytes, about_.bytes
        sender = int(sender_of(*connection)) if self.rank == 0 else int(about or b"0")
        if not 0 <= sender < self.world_size or sender == self.rank:
            raise ValueError("no other rank is its sender")
        if kind == POST and self.rank == 0:
            self._route(sender, self._named(about), content)
        elif kind == POST:
            self._read_soon(sender, content.bytes)
        elif kind == HELLO:
            host, pid = json.loads(content.bytes)
            self._processes[sender] = str(host), int(pid)
            if self.rank == 0 and not connection[0].bytes.startswith(b"\0"):  # that has been replaced already
                self._welcome(sender, connection[0].get(zmq.SRCFD))
        elif kind == FLUSH:
            # The answer comes after the handlers have had what came before.
            answer = partial(self._send, sender, ARRIVED, content=content.bytes)
            self._arrived.put(partial(self._put, answer))
        elif kind == ARRIVED:
            with self._news:
                self._unconfirmed.get(int(content.bytes), set()).discard(sender)
                self._news.notify_all()
        elif kind == CLOSING:
            self._standing.discard(sender)
            self._absent.pop(sender, None)
            self._left.add(sender)
            self._arrived.put(partial(self._note_end, self._closed_ranks, sender))
        else:
            raise ValueError(f"its kind is {kind[:20]!r}")

    def _named(self, receivers: bytes) -> tuple[int, ...] | None:
        if not receivers:
            return None
        ranks = tuple(int(rank) for rank in receivers.split(b","))
        if not all(0 <= rank < self.world_size for rank in ranks):
            raise ValueError(f"it is for {receivers[:20]!r}")
        return ranks

    # ---------------------------------------------------------------- connections that stand, and those that have ended

    def _read_monitor(self) -> None:
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._note_event(event["event"], event["value"])

    def _note_event(self, event: int, descriptor: int) -> None:
        if self.rank == 0:
            if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED):
                self._drop(self._connections.pop(descriptor, None))
            if event == zmq.EVENT_ACCEPTED:
                self._connections[descriptor] = None
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._send(0, HELLO, content=self._hello)
            self._stands(0)
        elif event == zmq.EVENT_DISCONNECTED:
            self._drop(0)

    def _welcome(self, rank: int, descriptor: int) -> None:
        """On rank 0: a rank has said hello on the connection with that descriptor."""
        # The descriptor may have been that of another connection, whose end can be read by now; and this one's, too.
        self._read_monitor()
        if descriptor not in self._connections:
            self._drop(rank)
            return
        for other, owner in self._connections.items():
            if owner == rank:
                self._connections[other] = (
                    None  # replaced: its end does not matter, and is not reported either
                )
        self._drop(self._connections[descriptor])
        self._connections[descriptor] = rank
        self._stands(rank)
        unsent = self._unsent.pop(rank, ())
        self._send(rank, HELLO, content=self._hello)
        for message in unsent:
            self._send(rank, *message)

    def _stands(self, rank: int) -> None:
        self._absent.pop(rank, None)
        with self._news:
            self._standing.add(rank)
            self._news.notify_all()

    def _drop(self, rank: int | None) -> None:
        """Note that the connection of a rank has ended."""
        if rank is not None and rank not in self._left:
            with self._news:
                self._standing.discard(rank)
                self._absent.setdefault(rank, time.monotonic() + BACK_WITHIN)
                self._news.notify_all()

    def _look_at_absent(self) -> None:
        now = time.monotonic()
        for rank, until in list(self._absent.items()):
            if now >= until + _HANDLED_FOR:
                self._lose(rank)  # a handler blocks
            elif now >= until and rank not in self._lost_soon:
                # What it has sent before it ended is handled first.
                self._lost_soon.add(rank)
                self._arrived.put(partial(self._lose, rank))

    def _lose(self, rank: int) -> None:
        self._lost_soon.discard(rank)
        if self._absent.pop(rank, None) is None or self._closing:
            return  # it is back, or this was said already
        self._note_end(self._lost_ranks, rank)
        if self._on_lost is not None:
            try:
                self._on_lost(rank)
            except Exception:
                _log.exception("what is to be done about rank %d, which is lost, failed", rank)

    @property
    def _ended_ranks(self) -> set[int]:
        return self._closed_ranks | self._lost_ranks

    def _note_end(self, ranks: set[int], rank: int) -> None:
        with self._news:
            ranks.add(rank)
            self._news.notify_all()

    # ---------------------------------------------------------------- the thread of the handlers

    def _call_handlers(self) -> None:
        while (work := self._arrived.get()) is not None:
            work()

    def _read_soon(self, sender: int, content: bytes) -> None:
        self._arrived.put(partial(self._read, sender, content))

    def _read(self, sender: int, content: bytes) -> None:
        try:
            topic, body = json.loads(content)
        except (ValueError, TypeError) as error:
            _say_malformed(error)
        else:
            self._deliver(Message(topic, sender, body))


def need_descriptors(world_size: int) -> None:
    """Let this process, rank 0, have an open connection to each of the other ranks, or raise LaunchError."""
    needed = psutil.Process().num_fds() + world_size
    wanted = needed + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    given = wanted if hard == resource.RLIM_INFINITY else max(soft, min(wanted, hard))
    try:
        if given < needed:
            raise ValueError("the hard limit is too low")
        resource.setrlimit(resource.RLIMIT_NOFILE, (given, hard))
    except (ValueError, OSError) as error:
        raise LaunchError(
            f"Rank 0 of {world_size} has a connection to every other rank, and may open {hard} files and connections at"
            f" once: it needs {needed}. Raise the hard limit on its host: `ulimit -Hn`, `LimitNOFILE=` of systemd, or"
            " `nofile` in /etc/security/limits.conf."
        ) from error


def sender_of(identity: Any) -> bytes:
    """Return the identity under which a peer has connected, of the first frame of a message."""
    # Once it has connected again, ZeroMQ names its former connection by a new number that begins with
    # a zero byte; what has come by that connection is read all the same.
    name: bytes = identity.bytes
    return str(identity.get("Identity")).encode() if name.startswith(b"\0") else name


def _say_malformed(error: Exception) -> None:
    _log.warning("ignored a malformed message on the side channel: %s", error)


def _endpoint(host: str) -> str:
    """Return a host name or address as ZeroMQ takes it."""
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"


def _yield_to_poster() -> None:
    """Keep this thread from taking the core of the one that has woken it."""
    # A scheduling class of Linux that changes nothing else: what is posted goes out as soon as a core is
    # free.
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
