"""Step times on their way to rank 0, and compared as soon as all have come."""

from __future__ import annotations

from collections import deque

from lightning_lockstep.distributed import Communicator, Gather
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.stragglers.verdict import StragglerTracker, Window
from lightning_lockstep.stragglers.waiting import OwnStep, RankTimes


class StragglerExchange:
    """Sends this rank's steps to rank 0, which compares them; one object on every rank for each fit."""

    # They are sent in batches of `every_n_steps`. On a GPU the last of them may not be known at once: then a batch is
    # sent after a later step.

    def __init__(self, communicator: Communicator, *, every_n_steps: int, min_share: float) -> None:
        channel, world_size = communicator.side_channel, communicator.world_size
        # No two fits share a topic.
        self._gather = Gather(channel, propagation_on(channel).topic("straggler"))
        self.close = self._gather.close
        self._host, self._every = communicator.host, every_n_steps
        self._batches: deque[list[OwnStep | None]] = deque([[]])  # not sent yet; the last has room
        self._sent = self._compared = 0  # batches
        # Of rank 0:
        self.tracker = StragglerTracker(world_size, every_n_steps=every_n_steps, min_share=min_share)
        self.hosts: dict[int, str] = {}
        self.missing: tuple[int, ...] = ()  # ranks whose last steps had not come at the end

    def step_done(self, own: OwnStep | None) -> list[Window]:  # None: not measured
        """Note the next step, and send what is complete; return what rank 0 has found since; from the main thread."""
        self._batches[-1].append(own)
        if len(self._batches[-1]) == self._every:
            self._batches.append([])
        while len(self._batches) > 1 and all(one is None or one.is_known for one in self._batches[0]):
            self._send()
        return self._found()

    def finish(self, timeout: float) -> list[Window]:  # of rank 0 [s]; 0 after a failure
        """Send the last steps; rank 0 waits for those of the others, and returns what the steps show that have come."""
        while self._batches:
            self._send()
        if timeout > 0:
            self._gather.timeout = timeout
            self.missing = self._gather.collect("last", None, for_all=False).missing
        return [*self._found(whole=False), *filter(None, [self.tracker.decide_now()])]

    def _send(self) -> None:
        steps = [own.times() if own is not None and own.is_known else None for own in self._batches.popleft()]
        self._gather.post(self._sent, {"host": self._host, "steps": steps}, for_all=False)
        self._sent += 1

    def _found(self, *, whole: bool = True) -> list[Window]:
        """Compare the batches that have come from all ranks, or else from any."""
        found: list[Window] = []
        while of_ranks := self._gather.take(self._compared, whole=whole):
            self.hosts |= {rank: sent["host"] for rank, sent in of_ranks.items()}
            for place in range(self._every):
                steps = {rank: sent["steps"][place : place + 1] for rank, sent in of_ranks.items()}
                if times := {
                    rank: RankTimes(*one) for rank, of_rank in steps.items() for one in of_rank if one
                }:
                    number = self._compared * self._every + place
                    found += filter(None, [self.tracker.add(number, times)])
            self._compared += 1
        return found
