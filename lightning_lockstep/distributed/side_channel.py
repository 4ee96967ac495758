"""Messages between ranks that need no collective.

Every rank has a mailbox: a queue in a TCP store that rank 0 hosts. A rank posts by handing the message to
its sending thread, which pushes it into the mailboxes of the receivers over a connection of its own. The
receiving thread of each rank sleeps in the store, on a second connection, until something arrives. Nobody
polls, a post returns at once, and all of it goes on while the main thread sits in a collective.

A rank that ends says goodbye first, so that a connection which breaks without one means that rank 0, where
the store lives, is gone.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistError, TCPStore

__all__ = ["LocalSideChannel", "Message", "SideChannel", "StoreSideChannel"]

_log = logging.getLogger(__name__)

# A receiving thread sleeps in the store for this long before it asks again; a message wakes it at once.
_SLEEP = timedelta(days=1)
_CLOSING = "lockstep/closing"
_WAKE = "lockstep/wake"
# Messages that came before anybody asked for their topic; older ones are dropped beyond this number.
_KEPT_UNREAD = 10_000

Handler = Callable[["Message"], None]


@dataclass(frozen=True)
class Message:
    """One message of the side channel.

    Attributes:
        topic: What it is about; handlers are registered by topic.
        sender: Rank that posted it.
        body: What was posted; whatever JSON can hold.
    """

    topic: str
    sender: int
    body: Any


class SideChannel(ABC):
    """Posts messages to ranks and hands those that arrive to handlers, off the main thread."""

    rank: int
    world_size: int

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._handlers: dict[str, list[Handler]] = defaultdict(list)
        self._unread: dict[str, deque[Message]] = defaultdict(lambda: deque(maxlen=_KEPT_UNREAD))
        self._lock = threading.RLock()
        self._at_close: list[Callable[[], None]] = []

    @property
    def usable(self) -> bool:
        """Whether a message that is posted now can still arrive."""
        return True

    @property
    def lost(self) -> bool:
        """Whether the channel broke though nobody said goodbye."""
        return False

    def at_close(self, function: Callable[[], None]) -> None:
        """Call ``function`` once when the channel is closed, after the last message has come.

        Ranks: any rank, alone; nothing is sent.
        """
        self._at_close.append(function)

    def _closed(self) -> None:
        for function in self._at_close:
            function()
        self._at_close.clear()

    def on(self, topic: str, handler: Handler) -> Callable[[], None]:
        """Call ``handler`` with every message of ``topic``, in the order in which they arrive.

        The handler runs on the receiving thread and must not block it. Messages that came before the first
        handler of their topic was registered are handed over at once.

        Args:
            topic: Topic to listen to.
            handler: Called with one :class:`Message` at a time.

        Returns:
            A function that removes the handler again.

        Ranks: any rank, alone; nothing is sent.
        """
        with self._lock:
            self._handlers[topic].append(handler)
            waiting = list(self._unread.pop(topic, ()))
            for message in waiting:
                self._call(handler, message)

        def remove() -> None:
            with self._lock, suppress(ValueError):
                self._handlers[topic].remove(handler)

        return remove

    @abstractmethod
    def post(self, topic: str, body: Any = None, *, to: int | Iterable[int] | None = None) -> None:
        """Send a message and return at once.

        Args:
            topic: What it is about.
            body: Anything that JSON can hold.
            to: Rank or ranks that shall get it; ``None`` means every rank but this one. Posting to oneself
                is allowed.

        Ranks: any rank, alone. Costs the caller a few microseconds and waits for nobody; a message to a
        rank that is gone is lost.
        """

    @abstractmethod
    def claim(self, key: str, value: str) -> str:
        """Write ``value`` under ``key`` unless a rank has done so before, and return what stands there now.

        Ranks: any rank, alone; one round trip to the store. Every caller of a key gets the same answer.
        """

    @abstractmethod
    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything posted so far has been handed to the store.

        Args:
            timeout: Longest wait [s].

        Returns:
            Whether all of it went out in time.

        Ranks: any rank, alone.
        """

    @abstractmethod
    def close(self, timeout: float = 2.0) -> None:
        """Send what is left, say goodbye and end the threads; calling it again does nothing.

        Args:
            timeout: Longest wait [s]. Rank 0, which hosts the store, waits this long for the others to say
                goodbye; pass 0 after a failure.

        Ranks: every rank once, at its own end; waits for nobody but as said for rank 0.
        """

    def _deliver(self, message: Message) -> None:
        with self._lock:
            handlers = list(self._handlers.get(message.topic, ()))
            if not handlers:
                self._unread[message.topic].append(message)
        for handler in handlers:
            self._call(handler, message)

    def _call(self, handler: Handler, message: Message) -> None:
        try:
            handler(message)
        except Exception:
            # One faulty handler must not silence the channel for all others.
            _log.exception("a handler of the side channel topic %r failed", message.topic)


class LocalSideChannel(SideChannel):
    """The side channel of a run with one process: what a rank posts to itself is handed over at once."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._claims: dict[str, str] = {}

    def post(self, topic: str, body: Any = None, *, to: int | Iterable[int] | None = None) -> None:
        """See :meth:`SideChannel.post`."""
        receivers = _receivers(to, self.rank, self.world_size)
        for _ in receivers:
            self._deliver(Message(topic, 0, json.loads(json.dumps(body))))

    def claim(self, key: str, value: str) -> str:
        """See :meth:`SideChannel.claim`."""
        return self._claims.setdefault(key, value)

    def flush(self, timeout: float = 5.0) -> bool:
        """See :meth:`SideChannel.flush`."""
        return True

    def close(self, timeout: float = 2.0) -> None:
        """See :meth:`SideChannel.close`."""
        self._closed()


class StoreSideChannel(SideChannel):
    """The side channel of a run with several ranks, over a TCP store.

    Args:
        host: Host name or address of rank 0.
        port: Port of the store on that host.
        rank: This rank.
        world_size: Number of ranks.
        server: The store itself, on rank 0, kept alive for as long as the channel.
        on_lost: Called once, with the reason, when the store is gone though nobody said goodbye.
        on_silent: Called on rank 0 with (rank, seconds) when a rank's heartbeat has stopped for longer than
            ``silence_limit``.
        heartbeat_interval: Time between two heartbeats of a rank [s].
        silence_limit: Age of the last heartbeat at which a rank counts as gone [s].
        connect_timeout: Longest wait for the store to answer [s].
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        server: TCPStore | None = None,
        on_lost: Callable[[str], None] | None = None,
        on_silent: Callable[[int, float], None] | None = None,
        heartbeat_interval: float = 5.0,
        silence_limit: float = 120.0,
        connect_timeout: float = 60.0,
    ) -> None:
        super().__init__(rank, world_size)
        self.host, self.port = host, port
        self.on_lost, self.on_silent = on_lost, on_silent
        self._server = server
        self._heartbeat_interval, self._silence_limit = heartbeat_interval, silence_limit
        self._outbox: queue.SimpleQueue[tuple[str, Any, tuple[int, ...]] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._closing = threading.Event()
        self._lost = threading.Event()
        self._goodbyes: set[int] = set()
        self._all_said_goodbye = threading.Event()
        self._send_store = _connect(host, port, connect_timeout)
        self._receive_store = _connect(host, port, connect_timeout)
        self._receive_store.set_timeout(_SLEEP)
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._send_store.set(_beat(rank), "0")
        self._sender = threading.Thread(target=self._send_loop, name="lockstep-send", daemon=True)
        self._receiver = threading.Thread(target=self._receive_loop, name="lockstep-receive", daemon=True)
        self._sender.start()
        self._receiver.start()

    @property
    def usable(self) -> bool:
        """See :attr:`SideChannel.usable`."""
        return not self._lost.is_set() and not self._closing.is_set()

    @property
    def lost(self) -> bool:
        """See :attr:`SideChannel.lost`."""
        return self._lost.is_set() and not self._closing.is_set()

    def post(self, topic: str, body: Any = None, *, to: int | Iterable[int] | None = None) -> None:
        """See :meth:`SideChannel.post`."""
        self._outbox.put((topic, body, _receivers(to, self.rank, self.world_size)))

    def claim(self, key: str, value: str) -> str:
        """See :meth:`SideChannel.claim`; when the store is gone, the caller's own value stands."""
        try:
            return bytes(self._send_store.compare_set(f"claim/{key}", "", value)).decode()
        except DistError:
            return value

    def flush(self, timeout: float = 5.0) -> bool:
        """See :meth:`SideChannel.flush`."""
        if self._lost.is_set() or not self._sender.is_alive():
            return False
        sent = threading.Event()
        self._outbox.put(sent)
        return sent.wait(timeout)

    def close(self, timeout: float = 2.0) -> None:
        """See :meth:`SideChannel.close`."""
        if self._closing.is_set():
            return
        self._closing.set()
        if not self._lost.is_set():
            self.post(_CLOSING)
        if self._server is not None and not self._lost.is_set():
            # The store dies with this process; let those who still talk to it hear that we leave.
            self.flush(timeout)
            self._all_said_goodbye.wait(timeout)
        self.post(_WAKE, to=self.rank)
        self._outbox.put(None)
        self._sender.join(max(timeout, 0.5))
        self._receiver.join(max(timeout, 0.5))
        self._closed()

    def _send_loop(self) -> None:
        due = time.monotonic() + self._heartbeat_interval
        while True:
            try:
                item = self._outbox.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                due = time.monotonic() + self._heartbeat_interval
                if self._lost.is_set() or not self._guarded(self._beat):
                    return
                continue
            if item is None or self._lost.is_set():
                return
            if isinstance(item, threading.Event):
                item.set()
            elif not self._guarded(partial(self._push, *item)):
                return

    def _push(self, topic: str, body: Any, receivers: tuple[int, ...]) -> None:
        data = json.dumps([topic, self.rank, body], default=str)
        for receiver in receivers:
            self._send_store.queue_push(_mailbox(receiver), data)

    def _receive_loop(self) -> None:
        def receive() -> None:
            topic, sender, body = json.loads(bytes(self._receive_store.queue_pop(_mailbox(self.rank))))
            self._take(Message(topic, sender, body))

        while self._guarded(receive):
            if self._closing.is_set() and self._woken:
                return

    _woken = False

    def _take(self, message: Message) -> None:
        if message.topic == _WAKE:
            self._woken = True
        elif message.topic == _CLOSING:
            self._goodbyes.add(message.sender)
            if len(self._goodbyes) >= self.world_size - 1:
                self._all_said_goodbye.set()
        else:
            self._deliver(message)

    def _guarded(self, talk: Callable[[], None]) -> bool:
        """Talk to the store; return whether the channel lives on."""
        try:
            talk()
        except DistError as error:
            orderly = self._closing.is_set() or 0 in self._goodbyes
            if not self._lost.is_set() and not orderly:
                self._lost.set()
                if self.on_lost is not None:
                    self.on_lost(str(error).splitlines()[0])
            self._lost.set()
            return False
        return True

    def _beat(self) -> None:
        self._send_store.set(_beat(self.rank), str(time.monotonic_ns()))
        if self.rank == 0 and self.on_silent is not None:
            self._listen_for_beats(self.on_silent)

    def _listen_for_beats(self, on_silent: Callable[[int, float], None]) -> None:
        others = [r for r in range(1, self.world_size) if r not in self._goodbyes]
        if not others or not self._send_store.check([_beat(r) for r in others]):
            return
        now = time.monotonic()
        for rank, beat in zip(others, self._send_store.multi_get([_beat(r) for r in others]), strict=True):
            seen, since = self._beats.get(rank, (b"", now))
            self._beats[rank] = (bytes(beat), since if bytes(beat) == seen else now)
            silent = now - self._beats[rank][1]
            if silent > self._silence_limit:
                on_silent(rank, silent)


def _receivers(to: int | Iterable[int] | None, rank: int, world_size: int) -> tuple[int, ...]:
    if to is None:
        return tuple(r for r in range(world_size) if r != rank)
    return (to,) if isinstance(to, int) else tuple(to)


def _mailbox(rank: int) -> str:
    return f"mail/{rank}"


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def _connect(host: str, port: int, timeout: float) -> TCPStore:
    return TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)
