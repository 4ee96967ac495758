"""The thread that sends what a rank has posted."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from lightning_lockstep.distributed.side_channel.base import Post, receivers_of
from lightning_lockstep.distributed.side_channel.links import FLUSH, POST, Links

__all__ = ["Flush", "Frames", "Reached", "Sender"]

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
    """Keep this thread from taking the core of the one that has woken it.

    A scheduling class of Linux that changes nothing else: what is posted goes out as soon as a core is free.
    """
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
