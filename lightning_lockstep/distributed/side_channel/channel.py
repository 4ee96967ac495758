"""Messages between ranks that need no collective: what every channel does, and the one of a single process."""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

_log = logging.getLogger(__name__)

# Messages that arrived before their topic had a handler; older ones are dropped beyond this number.
_KEPT_UNREAD = 10_000
#: How long a rank whose connection has ended has to connect again before it is lost [s].
BACK_WITHIN = 2.0
# How often a waiting rank looks whether the channel can still deliver [s].
_LOOK_EVERY = 0.5
# How long a rank waits for rank 0's answer to a claim [s].
_CLAIM_FOR = 3.0
_CLAIM = "lockstep/claim"

Handler = Callable[["Message"], None]
_Kept = TypeVar("_Kept")


class Message(NamedTuple):
    """A message of the side channel: its topic, the rank that posted it, and what it posted, which JSON can hold."""

    topic: str
    sender: int
    body: Any


class Post(NamedTuple):
    """One message as it was posted; the fields are the arguments of :meth:`SideChannel.post`."""

    topic: str
    body: Any
    to: int | tuple[int, ...] | None
    make: Callable[[Any], Any] | None


class SideChannel(ABC):
    """Posts messages to ranks and passes those that arrive to handlers, off the main thread."""

    rank: int
    world_size: int
    port: int = 0  # at which rank 0 listens, if it does

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._processes: dict[int, tuple[str, int]] = {}
        self._closing = False
        self._closed_ranks: set[int] = set()
        self._lost_ranks: set[int] = set()
        self._handlers: dict[str, tuple[Handler, ...]] = {}
        self._unread: dict[str, deque[Message]] = defaultdict(lambda: deque(maxlen=_KEPT_UNREAD))
        self._lock = threading.RLock()
        self._before_close: list[Callable[[], None]] = []
        self._at_close: list[Callable[[], None]] = []
        self._kept: dict[object, Any] = {}
        # Held while what ranks have said or done is noted, and notified of it.
        self._news = threading.Condition()
        self._claims: dict[str, str] = {}
        self._on_lost: Callable[[int], None] | None = None
        self.on(_CLAIM, self._take_claim)

    def watch_peers(self, on_lost: Callable[[int], None]) -> None:
        """Say who learns, on a thread of the channel, of a peer that is lost; replaces an earlier call."""
        # Its connection has ended, it has not closed its channel and has not come back. Rank 0 watches all others,
        # every rank watches rank 0.
        self._on_lost = on_lost

    def process_of(self, rank: int) -> tuple[str, int]:
        """Return host name and process id of a rank; ``("", 0)`` where they are not known here."""
        # Here and below: rank 0 knows it of all that have connected, every rank knows it of rank 0.
        return self._processes.get(rank, ("", 0))

    def has_closed(self, rank: int) -> bool:
        """Return whether another rank has closed its channel, as at the end of its program."""
        return rank in self._closed_ranks

    def get_or_create(self, factory: Callable[[SideChannel], _Kept]) -> _Kept:
        """Return what ``factory`` returns for this channel, the same object every time."""
        with self._lock:
            if factory not in self._kept:
                self._kept[factory] = factory(self)
            kept: _Kept = self._kept[factory]
            return kept

    def answers(self, rank: int) -> bool:
        """Return whether the connection to a rank stands and answers heartbeats."""
        return False

    @property
    def usable(self) -> bool:
        """Whether a message that is posted now can still arrive: all of them go by way of rank 0."""
        return not (self._closing or 0 in self._closed_ranks or 0 in self._lost_ranks)

    @property
    def lost(self) -> bool:
        """Whether the channel broke, since rank 0 is gone, though no rank has closed it."""
        return 0 in self._lost_ranks and not self._closing

    def before_close(self, function: Callable[[], None]) -> None:
        """Call ``function`` once when this rank begins to close the channel; the others may still use theirs."""
        self._before_close.append(function)

    def at_close(self, function: Callable[[], None]) -> None:
        """Call ``function`` once when the channel is closed, after the last message has arrived."""
        self._at_close.append(function)

    def _begins_to_close(self) -> None:
        for function in self._before_close:
            function()
        self._before_close.clear()

    def _closed(self) -> None:
        for function in self._at_close:
            function()
        self._at_close.clear()

    def on(self, topic: str, handler: Handler) -> Callable[[], None]:
        """Call ``handler`` with every message of a topic, in order of arrival; returns what removes it again."""
        # It runs on the receiving thread and must not block it. Messages that came before the first handler are passed
        # to it.
        with self._lock:
            for message in self._unread.pop(topic, ()):
                self._call(handler, message)
            # Only now, so that what arrives meanwhile waits for the lock in `_deliver`.
            self._handlers[topic] = (*self._handlers.get(topic, ()), handler)

        def remove() -> None:
            with self._lock:
                self._handlers[topic] = tuple(h for h in self._handlers[topic] if h is not handler)

        return remove

    def post(
        self,
        topic: str,
        body: Any = None,
        *,
        to: int | Iterable[int] | None = None,
        make: Callable[[Any], Any] | None = None,
    ) -> None:
        """Send a message and return at once; ``to=None`` is every rank but this one. Ranks: any, alone."""
        # `make` makes what is sent out of `body`, which JSON can hold, off the caller's thread and in the order of the
        # posts. A message to a rank that has exited is lost.
        self._put(Post(topic, body, to if to is None or isinstance(to, int) else tuple(to), make))

    @abstractmethod
    def _put(self, post: Post) -> None:
        """Take a message to be sent, and return at once."""

    def poster(self, topic: str, *, to: int, make: Callable[[Any], Any]) -> Callable[[Any], None]:
        """Return a function that posts a body, for frequent posts; arguments as for :meth:`post`."""
        put = self._put
        return lambda body: put(Post(topic, body, to, make))

    def claim(self, key: str, value: str) -> str:
        """Set ``key`` unless a rank has set it before, and return its value now. Ranks: any, alone; one round trip."""
        # Every caller gets the same answer; where rank 0 gives none, its own value.
        if self.rank != 0:
            self.post(_CLAIM, [key, value], to=0)
        with self._news:
            self.wait_for(self._news, lambda: self.rank == 0 or key in self._claims, _CLAIM_FOR)
            return self._claims.setdefault(key, value)

    def _take_claim(self, message: Message) -> None:
        key, value = message.body
        with self._news:
            first = self._claims.setdefault(key, value)
            self._news.notify_all()
        if self.rank == 0:
            self.post(_CLAIM, [key, first], to=message.sender)

    def wait_for(
        self,
        news: threading.Condition,
        arrived: Callable[[], bool],
        timeout: float,
        *,
        needs_main: bool = True,
    ) -> bool:
        """Wait until messages of other ranks have made ``arrived`` true; return whether they have."""
        # The one place in which a rank waits for what others send over this channel. The caller holds `news`, which a
        # handler notifies; `needs_main`: nothing can arrive any more once rank 0 has left.
        deadline = time.monotonic() + timeout
        while not arrived():
            left = deadline - time.monotonic()
            if left <= 0 or (needs_main and not self.usable):
                return False
            news.wait(min(left, _LOOK_EVERY))
        return True

    @abstractmethod
    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything posted has arrived, on ranks but 0 at rank 0; return whether it did in time."""
        # Rank 0 has passed on by then what is for other ranks.

    @abstractmethod
    def close(self, timeout: float = 2.0) -> None:
        """Send what is left, tell the peers and end the threads; only rank 0 waits for others. Ranks: every rank."""

    def _deliver(self, message: Message) -> None:
        handlers = self._handlers.get(message.topic)
        if not handlers:
            with self._lock:
                handlers = self._handlers.get(message.topic)
                if not handlers:
                    self._unread[message.topic].append(message)
                    return
        for handler in handlers:
            self._call(handler, message)

    def _call(self, handler: Handler, message: Message) -> None:
        try:
            handler(message)
        except Exception:
            # One faulty handler must not silence the channel for all others.
            _log.exception("a handler of the side channel topic %r failed", message.topic)


class LocalSideChannel(SideChannel):
    """The side channel of a run with one process: what a rank posts to itself is delivered at once."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _put(self, post: Post) -> None:
        made = post.body if post.make is None else post.make(post.body)
        for _ in receivers_of(post.to, self.rank, self.world_size):
            self._deliver(Message(post.topic, 0, json.loads(json.dumps(made, default=str))))

    def flush(self, timeout: float = 5.0) -> bool:
        """See :meth:`SideChannel.flush`."""
        return True

    def close(self, timeout: float = 2.0) -> None:
        """See :meth:`SideChannel.close`."""
        self._begins_to_close()
        self._closed()


def receivers_of(to: int | Iterable[int] | None, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the ranks that ``to`` means; ``None`` is every rank but ``rank``."""
    if to is None:
        return tuple(r for r in range(world_size) if r != rank)
    return (to,) if isinstance(to, int) else tuple(to)
