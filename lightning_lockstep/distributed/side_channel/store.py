"""The side channel over a TCP store that rank 0 hosts.

Every rank has a mailbox: a queue in the store. A rank posts by passing the message to its sending thread,
which pushes it into the mailboxes of the receivers over a connection of its own. The receiving thread of each
rank sleeps in the store, on a second connection, until something arrives. Nobody polls, a post returns at
once, and all of it goes on while the main thread sits in a collective.

A rank that closes its channel announces that first, so a connection that breaks without it means that rank 0,
which hosts the store, has exited.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore

from lightning_lockstep.distributed.side_channel.base import Message, Post, SideChannel, receivers_of

__all__ = ["StoreSideChannel"]

# A receiving thread sleeps in the store for this long before it asks again; a message wakes it at once.
_SLEEP = timedelta(days=1)
_CLOSING = "lockstep/closing"
_WAKE = "lockstep/wake"

_encode = json.JSONEncoder(default=str).encode
_decode = json.JSONDecoder().decode
_log = logging.getLogger(__name__)


class StoreSideChannel(SideChannel):
    """The side channel of a run with several ranks, over a TCP store.

    Args:
        host: Host name or address of rank 0.
        port: Port of the store on that host.
        rank: This rank.
        world_size: Number of ranks.
        server: The store itself, on rank 0, kept alive for as long as the channel.
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
        heartbeat_interval: float = 5.0,
        silence_limit: float = 120.0,
        connect_timeout: float = 60.0,
    ) -> None:
        super().__init__(rank, world_size)
        self.main_host = host
        self._server = server
        self._heartbeat_interval, self._silence_limit = heartbeat_interval, silence_limit
        self._outbox: queue.SimpleQueue[Post | threading.Event | None] = queue.SimpleQueue()
        self._closing = self._gone = self._woken = False
        self._closed_ranks: set[int] = set()
        self._all_closed = threading.Event()
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
        return not (self._gone or self._closing)

    @property
    def lost(self) -> bool:
        """See :attr:`SideChannel.lost`."""
        return self._gone and not self._closing

    def _put(self, post: Post) -> None:
        self._outbox.put(post)

    def poster(self, topic: str, *, to: int, make: Callable[[Any], Any]) -> Callable[[Any], None]:
        """See :meth:`SideChannel.poster`."""
        put = self._outbox.put
        return lambda body: put(Post(topic, body, to, make))

    def claim(self, key: str, value: str) -> str:
        """See :meth:`SideChannel.claim`; when the store is gone, the caller's own value stands."""
        try:
            return bytes(self._send_store.compare_set(f"claim/{key}", "", value)).decode()
        except DistError:
            return value

    def flush(self, timeout: float = 5.0) -> bool:
        """See :meth:`SideChannel.flush`."""
        if self._gone or not self._sender.is_alive():
            return False
        sent = threading.Event()
        self._outbox.put(sent)
        return sent.wait(timeout)

    def close(self, timeout: float = 2.0) -> None:
        """See :meth:`SideChannel.close`."""
        if self._closing:
            return
        self._closing = True
        if not self._gone:
            self.post(_CLOSING)
        if self._server is not None and not self._gone:
            # The store ends with this process: let the ranks that still use it learn that first.
            self.flush(timeout)
            self._all_closed.wait(timeout)
        self.post(_WAKE, to=self.rank)
        self._outbox.put(None)
        self._sender.join(max(timeout, 0.5))
        self._receiver.join(max(timeout, 0.5))
        self._closed()

    def _send_loop(self) -> None:
        _yield_to_caller()
        due = time.monotonic() + self._heartbeat_interval
        try:
            while not self._gone:
                with suppress(queue.Empty):
                    item = self._outbox.get(timeout=max(0.0, due - time.monotonic()))
                    if item is None:
                        return
                    if isinstance(item, threading.Event):
                        item.set()
                    else:
                        self._push(item)
                if time.monotonic() >= due:
                    due = time.monotonic() + self._heartbeat_interval
                    self._beat()
        except DistError as error:
            self._note_loss(error)

    def _push(self, post: Post) -> None:
        topic, body, to, make = post
        try:
            data = _encode([topic, self.rank, body if make is None else make(body)])
        except Exception:
            # One message that cannot be sent must not silence the channel for all others.
            _log.exception("a message of the side channel topic %r cannot be sent", topic)
            return
        for receiver in receivers_of(to, self.rank, self.world_size):
            self._send_store.queue_push(_mailbox(receiver), data)

    def _receive_loop(self) -> None:
        pop, mailbox = self._receive_store.queue_pop, _mailbox(self.rank)
        try:
            while not (self._closing and self._woken):
                self._take(Message(*_decode(bytes(pop(mailbox)).decode())))
        except DistError as error:
            self._note_loss(error)

    def _take(self, message: Message) -> None:
        if message.topic == _WAKE:
            self._woken = True
        elif message.topic == _CLOSING:
            self._closed_ranks.add(message.sender)
            if len(self._closed_ranks) >= self.world_size - 1:
                self._all_closed.set()
        else:
            self._deliver(message)

    def _note_loss(self, error: DistError) -> None:
        """The store does not answer any more: an orderly end, or rank 0 has exited."""
        orderly = self._closing or 0 in self._closed_ranks
        first, self._gone = not self._gone, True
        if first and not orderly and self._on_lost is not None:
            self._on_lost(0, str(error).splitlines()[0])

    def _beat(self) -> None:
        self._send_store.set(_beat(self.rank), str(time.monotonic_ns()))
        if self.rank == 0 and self._on_silent is not None:
            self._check_heartbeats(self._on_silent)

    def _check_heartbeats(self, on_silent: Callable[[int, float], None]) -> None:
        others = [r for r in range(1, self.world_size) if r not in self._closed_ranks]
        if not others or not self._send_store.check([_beat(r) for r in others]):
            return
        now = time.monotonic()
        for rank, beat in zip(others, self._send_store.multi_get([_beat(r) for r in others]), strict=True):
            seen, since = self._beats.get(rank, (b"", now))
            self._beats[rank] = (bytes(beat), since if bytes(beat) == seen else now)
            silent = now - self._beats[rank][1]
            if silent > self._silence_limit:
                on_silent(rank, silent)


def _yield_to_caller() -> None:
    """Keep this thread from taking the core of the one that has woken it.

    A scheduling class of Linux that changes nothing else: what is posted goes out as soon as a core is free.
    """
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _mailbox(rank: int) -> str:
    return f"mail/{rank}"


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def _connect(host: str, port: int, timeout: float) -> TCPStore:
    return TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)
