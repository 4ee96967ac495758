"""Code that must run on one rank after the other: a download, a compile cache, a file that all append to.

Rank 0 schedules a section: every rank reports to it that it has arrived and that it has finished, and rank 0
sends each rank its start and, at the end, the outcome. All of it goes over the side channel, so there is no
barrier per rank, and nobody hangs when the body fails on one of them.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_lockstep._settings import Faults
from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed.coordination.communicator import current_communicator
from lightning_lockstep.distributed.side_channel.channel import Message, SideChannel
from lightning_lockstep.errors import CollectiveStallError, RankFailedError

_REPORTS, _ANSWERS = "rank_order/report", "rank_order/answer"
_ALL_RANKS = "all ranks"
_IN_FLIGHT = "all ranks had arrived; the release message was still in flight"
# How long rank 0 may take to say which ranks the others wait for [s].
_STATUS_WITHIN = 2.0


@contextmanager
def in_rank_order(*, per_node: bool = False, timeout: float = 1800.0) -> Iterator[int]:
    """Run the body on one rank after the other; all ranks leave together.

    When the body raises on a rank, that rank keeps its error, the ranks before it and after it raise a
    :class:`RankFailedError` that carries it, and nobody hangs. The ranks after it skip the body.

    Args:
        per_node: Let one rank of each node run at a time, in the order of their arrival, rather than one rank
            of all; for what is done once on each node's own disk.
        timeout: Longest wait for the start of the body, and for the ranks after this one [s].

    Yields:
        This rank's number.

    Raises:
        ConfigurationError: ``timeout`` is no duration.
        RankFailedError: The body failed on another rank.
        CollectiveStallError: A rank did not arrive, or is still in the body; it is named.

    Ranks: all, together, though not at the same time; 4 messages per rank over the side channel and no
    collective. Without a process group the body just runs.
    """
    faults = Faults()
    faults.number("timeout", timeout, what="seconds", above=0, such_as=1800)
    faults.raise_all()
    communicator = current_communicator()
    if communicator.world_size == 1:
        yield communicator.rank
        return
    sections = communicator.side_channel.get_or_create(RankOrderedSections)
    queue = f"node {communicator.node_rank} {communicator.host}" if per_node else _ALL_RANKS
    section = sections.enter(queue, timeout=timeout)
    try:
        yield communicator.rank
    except BaseException as error:
        sections.leave(section, error="".join(traceback.format_exception(error)), timeout=timeout)
        raise
    sections.leave(section, error="", timeout=timeout)


@dataclass
class _Section:
    """What rank 0 knows of one section."""

    queues: dict[int, str] = field(default_factory=dict)  # rank -> the queue in which it waits
    started: set[int] = field(default_factory=set)
    outcomes: dict[int, str] = field(default_factory=dict)  # rank -> its error, or ""

    @property
    def errors(self) -> dict[str, str]:
        return {str(rank): error for rank, error in self.outcomes.items() if error}

    def ready(self) -> list[int]:
        """Return the ranks that may start now: the next one of each queue, or all once one has failed."""
        waiting = sorted(set(self.queues) - self.started)
        if self.errors:
            return waiting
        busy = {self.queues[rank] for rank in self.started - set(self.outcomes)}
        next_of: dict[str, int] = {}
        for rank in waiting:
            queue = self.queues[rank]
            # In the queue of all ranks a rank also waits for lower ones that have not arrived yet.
            in_order = queue != _ALL_RANKS or all(lower in self.outcomes for lower in range(rank))
            if queue not in busy and in_order:
                next_of.setdefault(queue, rank)
        return list(next_of.values())

    def status(self, world_size: int) -> str:
        """Return for whom the others are waiting."""
        inside = sorted(self.started - set(self.outcomes))
        absent = sorted(set(range(world_size)) - set(self.queues))
        parts = []
        if inside:
            parts.append(f"{ranks_in_words(inside)} still in the block")
        if absent:
            parts.append(f"{ranks_in_words(absent)} never entered it")
        return " and ".join(parts) or _IN_FLIGHT


class RankOrderedSections:
    """Lets the ranks into one section after the other, in rank order."""

    def __init__(self, channel: SideChannel) -> None:
        self._channel = channel
        self._entered = 0
        self._sections: dict[int, _Section] = {}  # on rank 0
        self._answers: dict[tuple[int, str], Any] = {}
        self._changed = threading.Condition()
        self._channel.on(_REPORTS, self._on_report)
        self._channel.on(_ANSWERS, self._on_answer)

    def enter(self, queue: str, *, timeout: float) -> int:
        """Wait until this rank may start and return the number of the section."""
        # Ranks that name the same ``queue`` run one after the other. ``timeout`` is in seconds.
        section, self._entered = self._entered, self._entered + 1
        self._report(section, "arrived", queue)
        errors = self._answer(section, "start", timeout)
        if errors:
            self._report(section, "finished", "")
            raise _failure(errors)
        return section

    def leave(self, section: int, *, error: str, timeout: float) -> None:
        """Let the next rank start and wait until all have finished; ``error`` is empty if all went well."""
        self._report(section, "finished", error)
        errors = self._answer(section, "outcome", timeout)
        if errors and not error:
            raise _failure(errors)

    def _report(self, section: int, what: str, text: str = "") -> None:
        self._channel.post(_REPORTS, [section, what, text], to=0)

    def _answer(self, section: int, what: str, timeout: float) -> dict[str, str]:
        wanted, status = (section, what), (section, "status")
        wait_for = self._channel.wait_for
        with self._changed:
            if not wait_for(self._changed, lambda: wanted in self._answers, timeout):
                self._report(section, "status?")
                wait_for(
                    self._changed, lambda: not {wanted, status}.isdisjoint(self._answers), _STATUS_WITHIN
                )
            if wanted in self._answers:
                errors: dict[str, str] = self._answers.pop(wanted)
                return errors
            missing = self._answers.pop(status, "rank 0 does not answer")
        raise CollectiveStallError(
            f"rank {self._channel.rank} waited {timeout:.0f} s in in_rank_order(): {missing}."
            " Every rank must enter the block; a longer `timeout` gives slow ranks more time."
        )

    def _on_answer(self, message: Message) -> None:
        section, what, content = message.body
        with self._changed:
            self._answers[section, what] = content
            self._changed.notify_all()

    def _on_report(self, message: Message) -> None:
        """Schedule; on rank 0, on the receiving thread alone."""
        number, what, text = message.body
        rank, world_size = message.sender, self._channel.world_size
        if what == "status?":
            known = self._sections.get(number)
            status = known.status(world_size) if known is not None else _IN_FLIGHT
            self._channel.post(_ANSWERS, [number, "status", status], to=rank)
            return
        section = self._sections.setdefault(number, _Section())
        (section.queues if what == "arrived" else section.outcomes)[rank] = text
        if ready := section.ready():
            section.started.update(ready)
            self._channel.post(_ANSWERS, [number, "start", section.errors], to=ready)
        if len(section.outcomes) == world_size:
            del self._sections[number]
            self._channel.post(_ANSWERS, [number, "outcome", section.errors], to=range(world_size))


def _failure(errors: dict[str, str]) -> RankFailedError:
    rank, text = min(errors.items(), key=lambda item: int(item[0]))
    last = text.rstrip().splitlines()[-1] if text.strip() else "no reason given"
    return RankFailedError(f"rank {rank} failed in in_rank_order(): {last}\n\n{text.rstrip()}")
