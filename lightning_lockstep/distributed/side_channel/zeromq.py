"""The side channel over ZeroMQ: a star. Rank 0 listens, every other rank has one connection, to rank 0.

A message is one frame, topic and body as JSON, of any rank to rank 0 or of rank 0 to any rank. The first one of a
connection is a hello, in both directions, with host and process id; the last one of a channel that is closed says so.
Who has sent a message to rank 0 is told by its connection. Messages from one rank to another keep their order: an
answer to a post says that the handlers have had all that came before.

One thread does everything: it turns what was posted into JSON, sends, receives and calls the handlers, none of which
blocks. A post returns at once. Heartbeats, reconnection, authentication and encryption are ZeroMQ's (ZMTP 3.1 with
CURVE), on a thread in C that needs no GIL: a rank that holds the GIL for minutes, or stands in ``pdb``, still answers.

A rank is lost if its connection has ended (its process did, or no heartbeat came for the silence limit) and it neither
says goodbye nor connects again within two seconds. ZeroMQ tells which descriptor a connection had that has ended, and
through which one a message has come: so rank 0 knows whose connection it was from the hello.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import logging
import os
import resource
import socket
import sys
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

from lightning_lockstep.distributed.side_channel.channel import BACK_WITHIN, Message, SideChannel
from lightning_lockstep.errors import LaunchError

_HELLO, _CLOSING = "channel/hello", "channel/closing"
_FLUSH, _ARRIVED = "channel/flush", "channel/arrived"
# Messages for a rank that is not connected yet, or not at the moment; older ones are dropped beyond this number.
_KEPT_UNSENT = 10_000
# Descriptors of rank 0 on top of those that are open and its connections: files, loaders, process groups.
_SPARE_DESCRIPTORS = 200
# How many messages are received before those are sent that were posted here meanwhile.
_RECEIVED_AT_ONCE = 100
# How long what was sent last may still take to leave when the connection is closed [ms].
_LINGER = 1000
# How often the sockets' thread looks whether ranks whose connection has ended are back [s].
_LOOK_AT_ABSENT = 0.25
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
        keys: tuple[bytes, bytes],
        host: str = "127.0.0.1",
        known_as: str | None = None,
        main_address: str | None = None,
        silence_limit: float = 120.0,
    ) -> None:
        super().__init__(rank, world_size)
        self._process = os.getpid()
        self._flushes = itertools.count(1)
        self._flushed: dict[int, int] = {}  # the last flush that each rank has answered
        self._outbox: deque[_Work] = deque()  # for the thread that owns the sockets
        self._ended = threading.Event()
        # Of the thread that owns the sockets; others only look.
        self._unsent: dict[int, deque[Any]] = defaultdict(lambda: deque(maxlen=_KEPT_UNSENT))
        self._descriptors: dict[int, int] = {}  # of rank 0's connection with each rank
        self._back_until: dict[int, float] = {}  # of ranks whose connection has ended

        reads, writes = os.pipe()  # wakes the thread that polls; cheap for the thread that posts
        os.set_blocking(writes, False)
        self._woken, self._wakes = io.FileIO(reads, "rb"), io.FileIO(writes, "wb")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if rank == 0 else zmq.DEALER)
        self._socket.linger, self._socket.sndhwm, self._socket.rcvhwm, self._socket.ipv6 = 0, 0, 0, True
        self._socket.heartbeat_ivl = int(1000 * min(_HEARTBEAT_EVERY, silence_limit / 4))
        self._socket.heartbeat_timeout = min(int(1000 * silence_limit), 2**31 - 1)
        self._hello = _encode([_HELLO, [socket.gethostname(), os.getpid()]]).encode()
        self._monitor = self._context.socket(zmq.PAIR)
        # Without a limit: at one, ZeroMQ's own thread would wait for the reader, and keep no heartbeat.
        self._monitor.linger = self._monitor.rcvhwm = 0
        self._socket.monitor("inproc://monitor", zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor.connect("inproc://monitor")
        if main_address is None:
            self._listen(host, known_as or host, keys)
        else:
            self._connect(main_address, keys)
        self.on(_HELLO, self._take_hello)
        self.on(_CLOSING, self._take_closing)
        self.on(_FLUSH, lambda message: self.post(_ARRIVED, message.body, to=message.sender))
        self.on(_ARRIVED, lambda message: self._flushed.update({message.sender: message.body}))
        self._sockets = threading.Thread(target=self._run_sockets, name="lockstep-channel", daemon=True)
        self._sockets.start()

    def _listen(self, host: str, known_as: str, keys: tuple[bytes, bytes]) -> None:
        # A rank that connects again takes the place of its former connection; to send to one that is not there fails.
        self._socket.router_handover = self._socket.router_mandatory = True
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        need_descriptors(self.world_size)
        self._socket.backlog = max(100, self.world_size)  # they all come at once
        self.port = self._socket.bind_to_random_port(_endpoint(host))
        self.address = f"{_endpoint(known_as)}:{self.port}"

    def _connect(self, main_address: str, keys: tuple[bytes, bytes]) -> None:
        self._socket.identity = str(self.rank).encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_serverkey, _ = keys
        self.port = int(main_address.rpartition(":")[2])
        self._socket.connect(main_address)

    def _post(self, topic: str, body: Any, to: tuple[int, ...]) -> None:
        self._put(partial(self._send_post, topic, body, to))

    def _put(self, work: _Work) -> None:
        """Have the thread that owns the sockets do something."""
        self._outbox.append(work)
        with suppress(OSError, ValueError):  # the pipe is full, or the thread has ended meanwhile
            self._wakes.write(b"\0")

    def flush(self, timeout: float = 5.0) -> bool:
        if not self._sockets.is_alive() or self._process != os.getpid():
            return False
        with self.news:
            number = next(self._flushes)
            asked = self._peers_that("stands", "absent") if self.rank == 0 else [0]
            self.post(_FLUSH, number, to=asked)
            return self.news.wait_for(
                lambda: all(self._flushed.get(one, 0) >= number or self._has_ended(one) for one in asked),
                timeout,
            )

    def _peers_that(self, *are: str) -> list[int]:
        return [rank for rank, is_now in list(self._peers.items()) if is_now in are]

    def close(self, timeout: float = 2.0) -> None:
        if self._closing or self._process != os.getpid():
            return
        if self.rank == 0 and timeout:
            with self.news:
                # Do not wait for a rank whose connection has ended, though it might come back.
                gone = ("absent", "closed", "lost")
                self.news.wait_for(lambda: len(self._peers_that(*gone)) >= self.world_size - 1, timeout)
        self._closing = True
        self.post(_CLOSING, to=self._peers_that("stands") if self.rank == 0 else [0])
        self.flush(timeout)
        self._put(self._ended.set)
        # At its end this thread waits until what was sent last has left: Python 3.12 and later start no thread at exit.
        self._sockets.join(max(timeout, 0.5) + max(timeout, 1.0))
        if not self._context.closed:
            _unfinished.append(self._context)
        super().close()

    # -- the thread that owns the sockets: sending --

    def _run_sockets(self) -> None:
        with suppress(AttributeError, OSError):
            # Linux then does not give this thread the core of the one that has woken it.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        poller = zmq.Poller()
        for one in (self._socket, self._monitor, self._woken):
            poller.register(one, zmq.POLLIN)
        try:
            while not self._ended.is_set():
                ready = dict(poller.poll(int(1000 * _LOOK_AT_ABSENT) if self._back_until else None))
                if self._woken.fileno() in ready:
                    self._woken.read(4096)
                for _ in range(len(self._outbox)):
                    self._outbox.popleft()()
                self._receive()
                self._look_at_absent()
        except zmq.ZMQError:
            _log.exception("the side channel can neither send nor receive any more")
        finally:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(_LINGER if self.lingers else 0)
            self._wakes.close()
            self._woken.close()
            self._context.term()

    def _send_post(self, topic: str, body: Any, to: tuple[int, ...]) -> None:
        try:
            content = _encode([topic, body]).encode()
        except Exception:
            # One message that cannot be sent must not silence the channel for all others.
            _log.exception("a message of the side channel topic %r cannot be sent", topic)
            return
        frame = zmq.Frame(content, copy=True)  # copied once, however many get it
        for rank in to:
            if rank == self.rank:
                self._deliver(Message(topic, rank, json.loads(content)[1]))
            else:
                self._send(rank, frame)

    def _send(self, to: int, content: Any) -> None:
        if self.rank != 0:
            self._socket.send(content, copy=False)
        elif to in self._unsent:
            self._unsent[to].append(content)  # behind what waits already
        else:
            try:
                self._socket.send_multipart((str(to).encode(), content), copy=False)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._drop(to)  # if it ended before its hello was read, no event names it
                if not self._has_ended(to):
                    self._unsent[to].append(content)

    # -- the thread that owns the sockets: receiving --

    def _receive(self) -> None:
        self._note_events()
        for _ in range(_RECEIVED_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._take(*frames)
            except (ValueError, TypeError) as error:
                _log.warning("ignored a malformed message on the side channel: %s", error)

    def _take(self, *frames: Any) -> None:
        """Take a message that has come; raise ValueError or TypeError if it makes no sense."""
        sender = 0
        if self.rank == 0:
            sender, frames = int(frames[0].bytes), frames[1:]
            if not 0 < sender < self.world_size:
                raise ValueError("no other rank is its sender")
        (content,) = frames
        topic, body = json.loads(content.bytes)
        if self.rank == 0 and topic == _HELLO:  # the first time or once more
            self._note_events()  # of an earlier connection, which may have had the same descriptor
            self._descriptors[sender] = content.get(zmq.SRCFD)
        self._deliver(Message(topic, sender, body))

    def _take_hello(self, message: Message) -> None:
        host, pid = message.body
        self.processes[message.sender] = str(host), int(pid)
        if self.rank == 0:
            self._stands(message.sender)
            for content in (self._hello, *self._unsent.pop(message.sender, ())):
                self._send(message.sender, content)

    def _take_closing(self, message: Message) -> None:
        # The connection does not stand any more, so that its end is no loss.
        self._back_until.pop(message.sender, None)
        self._note(message.sender, "closed")
        self._on_closed(message.sender)

    # -- connections that stand, and those that have ended --

    def _note_events(self) -> None:
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                has_ended = event["event"] == zmq.EVENT_DISCONNECTED
                if self.rank != 0 and has_ended:
                    self._drop(0)
                elif self.rank != 0:
                    self._send(0, self._hello)
                    self._stands(0)
                elif has_ended:
                    for rank in [rank for rank, one in self._descriptors.items() if one == event["value"]]:
                        del self._descriptors[rank]
                        self._drop(rank)

    def _stands(self, rank: int) -> None:
        self._back_until.pop(rank, None)
        self._note(rank, "stands")

    def _drop(self, rank: int) -> None:
        """Note that the connection of a rank has ended, which stood."""
        if self.answers(rank):
            self._back_until[rank] = time.monotonic() + BACK_WITHIN
            self._note(rank, "absent")

    def _look_at_absent(self) -> None:
        now = time.monotonic()
        for rank in [rank for rank, until in self._back_until.items() if now >= until]:
            del self._back_until[rank]
            if not self._closing:
                # First, so that who waits for this rank ends with a failure that names it.
                self._call("lost", self._on_lost, rank)
                self.lose(rank)


def need_descriptors(world_size: int) -> None:
    """Let this process, rank 0, have an open connection to each of the other ranks, or raise LaunchError."""
    needed = psutil.Process().num_fds() + world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if most < needed:
        raise LaunchError(
            f"Rank 0 of {world_size} has a connection to every other rank, and may open {hard} files and connections at"
            f" once: it needs {needed}. Raise the hard limit on its host: `ulimit -Hn`, `LimitNOFILE=` of systemd, or"
            " `nofile` in /etc/security/limits.conf."
        )
    wanted = min(needed + _SPARE_DESCRIPTORS, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _endpoint(host: str) -> str:
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
