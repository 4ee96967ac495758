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
# How often a waiting rank looks whether the channel can still deliver [s].
_LOOK_EVERY = 0.5
# How long a rank waits for rank 0's answer to a claim [s].
_CLAIM_FOR = 3.0
_CLAIM = "lockstep/claim"

Handler = Callable[["Message"], None]
_Kept = TypeVar("_Kept")


class Message(NamedTuple):
    """One message of the side channel.

    Attributes:
        topic: What it is about; handlers are registered by topic.
        sender: Rank that posted it.
        body: What was posted; whatever JSON can hold.
    """

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
    """Posts messages to ranks and passes those that arrive to handlers, off the main thread.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        silence_limit: How long a peer may be frozen or unreachable before ``on_silent`` is called [s].
        port: Port at which rank 0 listens, at one end of each connection of the channel; 0 where there is none.
    """

    rank: int
    world_size: int
    silence_limit: float = 120.0
    port: int = 0

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
        self._on_lost: Callable[[int, str], None] | None = None
        self._on_silent: Callable[[int, float, str], None] | None = None
        self.on(_CLAIM, self._take_claim)

    def watch_peers(
        self,
        *,
        on_lost: Callable[[int, str], None] | None = None,
        on_silent: Callable[[int, float, str], None] | None = None,
    ) -> None:
        """Say who is to learn of a peer that is gone; a later call replaces an earlier one.

        Args:
            on_lost: Called once with (rank, reason) when a peer's process has ended though it has not closed
                its channel. Rank 0 is watched by every rank, and watches all others.
            on_silent: Called once with (rank, seconds, reason) when a peer has been frozen, or its host
                unreachable, for too long.

        Ranks: any rank, alone; nothing is sent. Both are called on threads of the channel.
        """
        self._on_lost, self._on_silent = on_lost, on_silent

    def process_of(self, rank: int) -> tuple[str, int]:
        """Return host name and process id of a rank, ``("", 0)`` where this rank does not know them.

        Ranks: any rank, alone; nothing is sent. Rank 0 knows all that have connected, every rank knows rank 0.
        """
        return self._processes.get(rank, ("", 0))

    def has_closed(self, rank: int) -> bool:
        """Return whether another rank has closed its channel, as it does when its program comes to its end.

        Ranks: any rank, alone; nothing is sent. Rank 0 knows it of all ranks, every rank knows it of rank 0.
        """
        return rank in self._closed_ranks

    def get_or_create(self, factory: Callable[[SideChannel], _Kept]) -> _Kept:
        """Return what ``factory`` returns for this channel, the same object every time; it lives as long as that.

        Args:
            factory: Such as a class whose objects take a channel.

        Ranks: any rank, alone; nothing is sent but what ``factory`` sends.
        """
        with self._lock:
            if factory not in self._kept:
                self._kept[factory] = factory(self)
            kept: _Kept = self._kept[factory]
            return kept

    def answers(self, rank: int) -> bool:
        """Return whether a rank's process is known to run: the connection to it stands, and answers heartbeats.

        Ranks: any rank, alone; nothing is sent. Rank 0 knows it of all ranks, every rank knows it of rank 0.
        """
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
        """Call ``function`` once when this rank begins to close the channel, while the others may still use theirs.

        Ranks: any rank, alone; nothing is sent.
        """
        self._before_close.append(function)

    def at_close(self, function: Callable[[], None]) -> None:
        """Call ``function`` once when the channel is closed, after the last message has arrived.

        Ranks: any rank, alone; nothing is sent.
        """
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
        """Call ``handler`` with every message of ``topic``, in the order in which they arrive.

        The handler runs on the receiving thread and must not block it. Messages that arrived before the first
        handler of their topic was registered are passed to it at once.

        Args:
            topic: Topic to listen to.
            handler: Called with one :class:`Message` at a time.

        Returns:
            A function that removes the handler again.

        Ranks: any rank, alone; nothing is sent.
        """
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
        """Send a message and return at once.

        Args:
            topic: What it is about.
            body: Anything that JSON can hold.
            to: Rank or ranks that receive it; ``None`` means every rank but this one. Posting to oneself
                is allowed.
            make: Makes what is sent out of ``body``, off the caller's thread and in the order of the posts.

        Ranks: any rank, alone. Costs the caller a few microseconds and does not wait; a message to a
        rank that has exited is lost.
        """
        self._put(Post(topic, body, to if to is None or isinstance(to, int) else tuple(to), make))

    @abstractmethod
    def _put(self, post: Post) -> None:
        """Take a message to be sent, and return at once."""

    def poster(self, topic: str, *, to: int, make: Callable[[Any], Any]) -> Callable[[Any], None]:
        """Return a function that posts a body, for frequent posts; the arguments are those of :meth:`post`.

        Ranks: any rank, alone; nothing is sent yet.
        """
        put = self._put
        return lambda body: put(Post(topic, body, to, make))

    def claim(self, key: str, value: str) -> str:
        """Set ``key`` to ``value`` unless a rank has set it before, and return its value now.

        Ranks: any rank, alone; one round trip. Every caller of a key gets the same answer; where rank 0 gives
        none, its own value.
        """
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
        """Wait until messages of other ranks have made ``arrived`` true.

        The one place in which a rank waits for what others send over this channel.

        Args:
            news: Held by the caller; a handler notifies it of each message that matters.
            arrived: Tells whether the wait is over.
            timeout: Longest wait [s].
            needs_main: Whether nothing can arrive any more once rank 0 has left.

        Returns:
            Whether it is; false when the time is over or nothing can arrive any more.

        Ranks: any rank, alone; nothing is sent.
        """
        deadline = time.monotonic() + timeout
        while not arrived():
            left = deadline - time.monotonic()
            if left <= 0 or (needs_main and not self.usable):
                return False
            news.wait(min(left, _LOOK_EVERY))
        return True

    @abstractmethod
    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything posted so far has arrived: at its receivers on rank 0, at rank 0 on the others.

        Rank 0 has passed on by then what is for other ranks.

        Args:
            timeout: Longest wait [s].

        Returns:
            Whether all of it arrived in time.

        Ranks: any rank, alone.
        """

    @abstractmethod
    def close(self, timeout: float = 2.0) -> None:
        """Send what is left, tell the peers and end the threads; calling it again does nothing.

        Args:
            timeout: Longest wait [s]. Rank 0 waits this long for the other ranks to close theirs; pass 0
                after a failure.

        Ranks: every rank once, at its own end; only rank 0 waits for others.
        """

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
