"""An attempt, one call of a Trainer by all ranks, and the failure that ends it: all agree on which rank failed first.

======= =============================================== ========================================================
state   what it means on a rank                         what follows
======= =============================================== ========================================================
running nothing has ended the attempt                   failed, raised or over
failed  another rank has failed first                   raised, because of that; else the end by force
raised  this rank raises, and waits for nobody          over, when its Trainer is done; else the end by force
over    nothing ends this rank; failures are kept       running, when it enters the next attempt
======= =============================================== ========================================================

A rank that raises reports that before its program can catch the error:

    rank 2 (raises)          rank 0                             another rank (receiving thread)
    ---------------          ------                             -------------------------------
    is "raised"
    failure n, record ---->  Does attempt n have a failure?
    waits                    No: this record is the first one.
                      <----  failure n, record -------------->  running in attempt n: is "failed"
    goes on                                                     before attempt n: is "failed" once it enters it
                                                                over with attempt n: goes on

Without an answer within a third of the grace period the rank that raises decides alone.

The end of a process is a failure of every attempt from then on. The rank that has started the process reports it, or
rank 0, which has lost the connection. If rank 0 ends, every other rank notices that and decides alone.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil

from lightning_lockstep.distributed.failure.record import (
    FailureRecord,
    describe_error,
    describe_exit,
    own_place,
)
from lightning_lockstep.distributed.side_channel.channel import Message, SideChannel
from lightning_lockstep.distributed.side_channel.gather import Gather
from lightning_lockstep.errors import CollectiveError

_FAILURE, _MEETING = "failure", "the beginning of a run"
# The number of the attempt in a message about the end of a process.
_EVERY_ATTEMPT = -1
#: How long a message that has been sent may take to arrive [s].
ARRIVES_WITHIN = 1.0
_VANISHED = (
    "its connection has ended without a report: its process was killed, or was stopped for longer than silence_limit,"
    " or its host cannot be reached"
)
_GONE = "its process has ended without a report: it was killed, or it has ended itself"
_LEFT = "its program has ended while other ranks wait for it"


class Attempt:
    """The attempt that this rank is in, and the first failure of each attempt. Ranks: one object on every rank."""

    def __init__(self, channel: SideChannel) -> None:
        self.channel = channel
        self.grace_period = 10.0  # from the message of a failure to an end by force [s]
        # Returns the folder for reports of this run, or None if none are written; never raises.
        self.folder: Callable[[], Path | None] = lambda: None
        self.prints_report = channel.rank == 0  # of another rank's failure
        # Called with the first failure once it has made this rank "failed" or "raised", or is news to one that is
        # "over", on any thread, while `channel.news` is held.
        self.on_failure: Callable[[FailureRecord], None] = lambda record: None
        self.number = 0  # how many attempts this rank has entered
        self.state: Literal["running", "failed", "raised", "over"] = "over"
        self.record: FailureRecord | None = None  # of the rank that failed first in this attempt
        self.failed_at = 0.0  # when the record was known here, of a monotonic clock [s]
        self.decided_alone = False  # because rank 0 does not answer
        self.is_outlived = False  # a rank is lost: that ends all attempts over this group, and no other rank
        self._failures: dict[int, FailureRecord] = {}  # the first failure of each attempt that has one
        self._topics: Counter[str] = Counter()
        self._meeting: Gather | None = None
        self._program_ends = False  # rank 0's program begins no further attempt

    @property
    def has_failure(self) -> bool:
        """Whether any rank is known to have failed; costs two attribute reads."""
        return self.record is not None

    @property
    def ended_process(self) -> FailureRecord | None:
        """The record of the first rank whose process has ended, if one has."""
        return self._failures.get(_EVERY_ATTEMPT)

    def topic(self, name: str) -> str:
        """Return ``name`` with the number of the attempt, and how often that has asked; the same on every rank."""
        self._topics[name] += 1
        return f"{name}/{self.number}.{self._topics[name]}"

    # -- begin and end of an attempt --

    def enter(self) -> None:
        """Enter the next attempt; by now grace period and folder are set. Ranks: any, alone."""
        if self._meeting is None and self.channel.world_size > 1:  # begin to receive failures
            self._meeting = Gather(self.channel, _MEETING, watched=True)
            self._meeting.on_entry = self._decide_left_if_awaited
            self.channel.on(_FAILURE, self._take_message)
            self.channel.watch_peers(self._lost, lambda rank: self._decide_left_if_awaited())
        with self.channel.news:
            self.number, self.state, self.record = self.number + 1, "running", None
            self.decided_alone = False
            self._topics.clear()
            self._apply()

    def meet(self, timeout: float, *, renews: bool = False) -> bool:
        """Wait for all ranks to enter this attempt; return whether to connect anew. Ranks: all; a gather."""
        # `renews`: this rank wants to, because its Trainer has other options.
        if self._meeting is None:
            return False
        self._meeting.timeout = timeout
        renews = renews or any(number < self.number for number in self._failures)
        return any(self._meeting.collect(self.number, renews).complete("The beginning of a run"))

    def leave(self) -> None:
        """End this attempt here: nothing ends this rank any more until it enters another one."""
        with self.channel.news:
            self.state = "over"

    # -- what ends an attempt --

    def fail(self, error: BaseException) -> FailureRecord:
        """Report that this rank raises ``error``; return the record of the first failure. Ranks: any, alone."""
        if self.state == "raised" and self.record is not None:
            return self.record  # this rank has failed before: saving after a failure may fail too
        own = self.describe(error)
        with self.channel.news:
            was_running, self.state = self.state == "running", "raised"
        if self._failure_of(self.number) is None:
            self._report(self.number, own)
        with self.channel.news:
            first = self._failure_of(self.number) or own
            if was_running:
                self._end_with(first)
            return first

    def set_raised(self, record: FailureRecord) -> None:
        """Let this rank be "raised", because of a failure of which the other ranks hear without it."""
        with self.channel.news:
            self.state, self.record = "raised", self.record or record

    def report_diagnosis(self, error: CollectiveError) -> bool:
        """On rank 0: let all ranks raise an error of the guard; return false if there is another failure."""
        return self._decide(self.number, replace(self.describe(error), kind="collective"))

    def outlive(self, record: FailureRecord) -> None:
        """End all attempts over this group, but no rank, because the others outlive one. Ranks: any, alone."""
        with self.channel.news:
            self.is_outlived = True
            self._failures.setdefault(_EVERY_ATTEMPT, record)
            self._apply()
            self.channel.news.notify_all()

    def describe(self, error: BaseException) -> FailureRecord:
        return describe_error(error, self.channel.rank, self.channel.world_size)

    # -- which failure is the first --

    def _report(self, number: int, record: FailureRecord) -> None:
        """Have rank 0 decide about a failure, and wait for its answer; decide alone if none comes."""
        if self.channel.rank == 0:
            if self._decide(number, record):
                self.channel.flush(1.0)
            return
        self.channel.post(_FAILURE, [number, record.to_json()], to=0)
        seconds = ARRIVES_WITHIN if record.kind == "interrupt" else self.grace_period / 3
        if not self.channel.wait_for(lambda: self._failure_of(number) is not None, seconds, stops=False):
            self._decide(number, record)

    def _decide(self, number: int, record: FailureRecord) -> bool:
        """Make this the first failure of an attempt, unless there is one: rank 0 for all, another rank for itself."""
        record = record.in_folder(self.folder())
        if record.ended and not record.where:  # it cannot say where it was; the other ranks are near
            record = replace(record, where=own_place())
        with self.channel.news:
            if number in self._failures:
                return False  # the first one stays: what a rank has raised explains more than a diagnosis
            if number == _EVERY_ATTEMPT:  # what the process raised before it ended explains more than its end
                record = next((one for one in self._failures.values() if one.rank == record.rank), record)
            if self.channel.rank != 0:
                self.decided_alone = True
            else:
                self.channel.post(_FAILURE, [number, record.to_json()])
            self._accept(number, record)
            return True

    def _take_message(self, message: Message) -> None:
        number, text = message.body
        take = self._decide if self.channel.rank == 0 else self._accept
        take(number, FailureRecord.from_json(text))

    def _accept(self, number: int, record: FailureRecord) -> None:
        """Keep what is decided, and apply it to this rank."""
        with self.channel.news:
            if record.kind == "collective" and self.state == "running":
                # Rank 0 may be in the attempt before, and this rank wait for it in `meet`.
                number = self.number
            # A process often ends because of a failure that is known, or after it has raised itself.
            is_news = self._failure_of(self.number) is None and record not in self._failures.values()
            self._failures.setdefault(number, record)
            if self.state == "over" and is_news and number in (_EVERY_ATTEMPT, self.number):
                self.on_failure(record)
            self._apply()
            self.channel.news.notify_all()

    def _apply(self) -> None:
        """Let a failure of this attempt stop this rank."""
        first = self._failure_of(self.number)
        if self.state == "running" and first is not None:
            self.state = "failed"
            self._end_with(first)

    def _end_with(self, first: FailureRecord) -> None:
        self.failed_at, self.record = time.monotonic(), first
        self.on_failure(first)

    def _failure_of(self, number: int) -> FailureRecord | None:
        """Return the first failure of an attempt, as far as it is known here."""
        return self._failures.get(number) or self._failures.get(_EVERY_ATTEMPT)

    # -- ranks whose process or program has ended --

    def report_child_exit(self, rank: int, returncode: int, pid: int) -> FailureRecord:
        """Inform all ranks that one that this rank has started has ended; return what is known of who failed first."""
        ended = describe_exit(rank, self.channel.world_size, pid, returncode)
        self._report(_EVERY_ATTEMPT, ended)
        return self.record or self.ended_process or ended

    def report_lost_parent(self) -> None:
        """Note, on a rank that rank 0 has started, that its process has ended."""
        self._lost(0, _GONE)
        self.channel.lose(0)

    def report_ended_here(self) -> None:
        """Report ranks of this host whose process has ended."""
        for rank, pid in self.others_here().items():
            if is_running(pid) or self.channel.has_closed(rank):
                continue
            if rank == 0:
                self.report_lost_parent()
            else:
                self._report(_EVERY_ATTEMPT, self._end_of(rank, "vanished", _GONE))

    def others_here(self) -> dict[int, int]:
        """Return the process ids of the other ranks of this host."""
        own, _ = self.channel.process_of(self.channel.rank)
        ranks = list(self.channel.processes.items())
        return {rank: pid for rank, (host, pid) in ranks if host == own and rank != self.channel.rank}

    def end_program(self) -> None:
        """Note, on rank 0, that this program begins no further attempt, and end the wait of ranks that do."""
        self._program_ends = True
        self._decide_left_if_awaited()

    def decide_left(self, rank: int) -> None:
        """Make it a failure that a rank's program has ended while this rank, or another one, waits for it."""
        self._decide(_EVERY_ATTEMPT, self._end_of(rank, "exit", _LEFT))

    def _decide_left_if_awaited(self) -> None:
        """On rank 0: see whether ranks wait in `meet` for one whose program has ended."""
        if self._meeting is not None and self._meeting.is_awaited:
            for rank in range(self.channel.world_size):
                if self.channel.has_closed(rank) or (rank == 0 and self._program_ends):
                    self.decide_left(rank)

    def _lost(self, rank: int, why: str = _VANISHED) -> None:
        with self.channel.news:
            # Every rank decides alone about the end of rank 0. Then rank 1 prints, and one rank of each other host.
            if rank == 0 and self._failure_of(self.number) is None:
                prints = self.channel.rank == 1 or os.environ.get("LOCAL_RANK") == "0"
                self.prints_report = self.prints_report or prints
            self._decide(_EVERY_ATTEMPT, self._end_of(rank, "vanished", why))

    def _end_of(self, rank: int, kind: Literal["exit", "vanished"], why: str) -> FailureRecord:
        size, process = self.channel.world_size, self.channel.process_of(rank)
        return FailureRecord(rank, size, *process, kind, why, exit_code=1)


def is_running(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def attempt_on(channel: SideChannel) -> Attempt:
    """Return the attempt of the ranks of a side channel; the same object for as long as the channel lives."""
    return channel.get_or_create(Attempt)
