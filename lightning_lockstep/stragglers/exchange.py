"""Step times on their way to rank 0, and compared as soon as all have come."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.side_channel.channel import Message
from lightning_lockstep.stragglers.verdict import StragglerTracker, Window
from lightning_lockstep.stragglers.waiting import OwnStep, RankTimes


class Collection:
    """What rank 0 does with the steps that the ranks have sent: waits until all have come, then compares."""

    def __init__(self, world_size: int, tracker: StragglerTracker) -> None:
        self.tracker, self.windows = tracker, deque[Window]()  # completed, and not taken yet
        self.hosts: dict[int, str] = {}
        self.missing: frozenset[int] = frozenset()  # ranks whose last steps had not come at the end
        self._lock = threading.Lock()
        self._ranks = range(world_size)
        self._steps: dict[int, dict[int, RankTimes]] = defaultdict(dict)  # by step and rank
        self._reached = dict.fromkeys(self._ranks, -1)
        self._finished: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether the last steps of all ranks have come."""
        return len(self._finished) == len(self._ranks)

    def take(self, message: Message) -> None:
        """Take a message of :class:`StragglerExchange`."""
        rank, body = message.sender, message.body
        with self._lock:
            if self.missing:
                return  # the comparison is over
            self.hosts[rank] = body["host"]
            for number, *times in body["steps"]:
                self._steps[number][rank] = RankTimes(*times)
            self._reached[rank] = body["reached"]
            if body["final"]:
                self._finished.add(rank)
            self._compare(self._ranks)

    def finish(self) -> None:
        """Compare what has come, without the ranks whose last steps have not."""
        with self._lock:
            self.missing = frozenset(self._ranks) - self._finished
            self._compare(self._finished)
            self.windows.extend(filter(None, [self.tracker.decide_now()]))

    def _compare(self, ranks: Iterable[int]) -> None:
        """Compare the steps that all of these ranks have reached."""
        reached = min((self._reached[rank] for rank in ranks), default=-1)
        for number in sorted(step for step in self._steps if step <= reached):
            self.windows.extend(filter(None, [self.tracker.add(number, self._steps.pop(number))]))


class StragglerExchange:
    """Sends this rank's steps to rank 0; one object on every rank for each fit."""

    def __init__(self, communicator: Communicator, *, every_n_steps: int, min_share: float) -> None:
        channel, world_size = communicator.side_channel, communicator.world_size
        self._channel, self._host, self._every = channel, communicator.host, every_n_steps
        self._topic = propagation_on(channel).topic("straggler")  # no two fits share one
        self.collection: Collection | None = None  # of rank 0
        self.close: Callable[[], None] = lambda: None
        if communicator.is_main:
            tracker = StragglerTracker(world_size, every_n_steps=every_n_steps, min_share=min_share)
            self.collection = Collection(world_size, tracker)
            self.close = channel.on(self._topic, self.collection.take)
        self._steps: deque[tuple[int, OwnStep]] = deque()  # not sent yet
        self._reached = -1

    def step_done(self, own: OwnStep | None) -> None:  # None: not measured
        """Note the next step, and send the last ones if it is time to; from the main thread."""
        self._reached += 1
        if own is not None:
            self._steps.append((self._reached, own))
        if (self._reached + 1) % self._every == 0:
            self._send(final=False)

    def finish(self, timeout: float) -> None:  # of rank 0 [s]; 0 after a failure
        """Send the last steps; rank 0 waits for those of the others and compares what has come."""
        self._send(final=True)
        collection = self.collection
        if collection is not None:
            if timeout > 0:
                self._channel.wait_for(lambda: collection.complete, timeout)
            collection.finish()

    def _send(self, *, final: bool) -> None:
        known = []
        while self._steps and self._steps[0][1].is_known:  # on a GPU the last ones may not be
            number, own = self._steps.popleft()
            known.append([number, *own.times()])
        reached = self._steps[0][0] - 1 if self._steps else self._reached
        body = {"host": self._host, "steps": known, "reached": reached, "final": final}
        self._channel.post(self._topic, body, to=0)
