"""Messages between ranks that need no collective: what every channel does, and all of the one of a single process."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

_log = logging.getLogger(__name__)

# Messages that arrived before their topic had a handler; older ones are dropped beyond this number.
_KEPT_UNREAD = 10_000
#: How long a rank whose connection has ended has to connect again before it is lost [s].
BACK_WITHIN = 2.0
# How often a waiting rank looks whether the channel can still deliver, and whether it is to stop [s].
_LOOK_EVERY = 0.1

Handler = Callable[["Message"], None]
_Kept = TypeVar("_Kept")
# What is known of another rank. "absent": it may connect again within `BACK_WITHIN`. The last two are for good.
_Peer = Literal["stands", "absent", "closed", "lost"]


class Message(NamedTuple):
    """A message of the side channel: its topic, the rank that posted it, and what it posted, which JSON can hold."""

    topic: str
    sender: int
    body: Any


class SideChannel:
    """Posts messages to ranks and passes those that arrive to handlers, off the main thread."""

    # A process without other ranks has this one, which delivers at once what the process posts to itself.

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.port = 0  # at which rank 0 listens, if it does
        # Host name and process id of ranks: of all once they have met; until then of those connected to this one.
        self.processes: dict[int, tuple[str, int]] = {}
        self.lingers = True  # what was posted last may still take a while to leave when this is closed
        #: Held while what ranks have said or done is noted; also notified of each message that was handled.
        self.news = threading.Condition()
        self._closing = False
        # Rank 0 knows about all ranks that have connected, every rank about rank 0.
        self._peers: dict[int, _Peer] = {}
        self._handlers: dict[str, tuple[Handler, ...]] = {}
        self._unread: dict[str, deque[Message]] = defaultdict(lambda: deque(maxlen=_KEPT_UNREAD))
        self.watched: list[Any] = []  # gathers of which the guard finds out why they do not end
        self._at_close: list[Callable[[], None]] = []
        self._kept: dict[object, Any] = {}
        self._on_lost: Callable[[int], None] = lambda rank: None
        self._on_closed: Callable[[int], None] = lambda rank: None
        # Raises in a wait if this rank is to stop, or returns whether it is to wait for nobody.
        self.ends_wait: Callable[[], bool] = lambda: False

    def watch_peers(self, on_lost: Callable[[int], None], on_closed: Callable[[int], None] = lambda rank: None) -> None:
        """Call one of these with each rank that is lost, or has closed its channel, on a thread of the channel."""
        # A rank is lost if its connection has ended, it has not closed its channel and has not come back. Rank 0
        # watches all others, every rank watches rank 0.
        self._on_lost, self._on_closed = on_lost, on_closed
        for rank in sorted(self._peers):
            if self._peers[rank] == "lost":
                on_lost(rank)

    def lose(self, rank: int) -> None:
        self._note(rank, "lost")

    def _note(self, rank: int, is_now: _Peer) -> None:
        with self.news:
            if not self._has_ended(rank):
                self._peers[rank] = is_now
            self.news.notify_all()

    def _has_ended(self, rank: int) -> bool:
        return self._peers.get(rank) in ("closed", "lost")

    def process_of(self, rank: int) -> tuple[str, int]:
        """Return host name and process id of a rank; ``("", 0)`` if they are not known here."""
        return self.processes.get(rank, ("", 0))

    def has_closed(self, rank: int) -> bool:
        """Return whether another rank has closed its channel, as at the end of its program."""
        return self._peers.get(rank) == "closed"

    def get_or_create(self, factory: Callable[[SideChannel], _Kept]) -> _Kept:
        """Return what ``factory`` returns for this channel, the same object every time."""
        with self.news:
            if factory not in self._kept:
                self._kept[factory] = factory(self)
            kept: _Kept = self._kept[factory]
            return kept

    def answers(self, rank: int) -> bool:
        """Return whether the connection to a rank stands; that of a stopped rank does until the silence limit."""
        return self._peers.get(rank) == "stands"

    @property
    def usable(self) -> bool:
        """Whether a message that is posted now can still arrive: each comes from rank 0 or goes there."""
        return not (self._closing or self._has_ended(0))

    @property
    def lost(self) -> bool:
        """Whether rank 0 is gone though it has not closed its channel."""
        return self._peers.get(0) == "lost" and not self._closing

    def at_close(self, function: Callable[[], None]) -> None:
        """Call ``function`` once when the channel is closed, after the last message has arrived."""
        self._at_close.append(function)

    def on(self, topic: str, handler: Handler) -> Callable[[], None]:
        """Call ``handler`` with every message of a topic, in order of arrival; returns what removes it again."""
        # The handler runs on the thread of the channel and must not block it. It also gets what came before it.
        with self.news:
            for message in self._unread.pop(topic, ()):
                self._call(topic, handler, message)
            # Only now: a message that arrives meanwhile waits in `_deliver`.
            self._handlers[topic] = (*self._handlers.get(topic, ()), handler)

        def remove() -> None:
            with self.news:
                self._handlers[topic] = tuple(h for h in self._handlers[topic] if h is not handler)

        return remove

    def post(self, topic: str, body: Any = None, *, to: int | Iterable[int] | None = None) -> None:
        """Send a message and return at once; ``to=None`` is every rank but this one. Ranks: any, alone."""
        # Rank 0 posts to any ranks, all others post to rank 0. JSON of `body` is made later, on another thread. A
        # message to a rank that has exited is lost.
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        receivers = (to,) if isinstance(to, int) else tuple(others if to is None else to)
        if self.rank != 0 and any(receivers):
            raise ValueError(f"rank {self.rank} posts to {receivers}, and can post to rank 0 alone")
        self._post(topic, body, receivers)

    def _post(self, topic: str, body: Any, to: tuple[int, ...]) -> None:
        if 0 in to:
            self._deliver(Message(topic, 0, json.loads(json.dumps(body, default=str))))

    def wait_for(self, arrived: Callable[[], bool], timeout: float, *, stops: bool = True) -> bool:
        """Wait until messages of other ranks have made ``arrived`` true; return whether they have."""
        # Every wait for messages of other ranks is here. Once rank 0 has left nothing can arrive any more. `stops`: end
        # with what is to stop this rank.
        deadline = time.monotonic() + timeout
        while not arrived():
            left = deadline - time.monotonic()
            if left <= 0 or (stops and self.ends_wait()) or not self.usable:
                return False
            with self.news:
                if not arrived():
                    self.news.wait(min(left, _LOOK_EVERY))
        return True

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything posted has arrived, on ranks but 0 at rank 0; return whether it did in time."""
        # Rank 0 has passed on by then what is for other ranks.
        return True

    def close(self, timeout: float = 2.0) -> None:
        """Send what is left, tell the peers and end the threads; only rank 0 waits for others. Ranks: every rank."""
        for function in self._at_close:
            function()
        self._at_close.clear()

    def _deliver(self, message: Message) -> None:
        with self.news:
            handlers = self._handlers.get(message.topic)
            if not handlers:
                self._unread[message.topic].append(message)
                return
        for handler in handlers:
            self._call(message.topic, handler, message)
        with self.news:
            self.news.notify_all()

    def _call(self, topic: str, handler: Callable[[Any], None], argument: Any) -> None:
        try:
            handler(argument)
        except Exception:
            # One faulty handler must not silence the channel for all others.
            _log.exception("a handler of the side channel topic %r failed", topic)
