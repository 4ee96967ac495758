"""Which failure was the first, and what the others were: lost peers, errors that all ranks raise alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from lightning_lockstep.distributed.failure.process_exit import wait_for_reports
from lightning_lockstep.distributed.failure.record import FailureRecord
from lightning_lockstep.distributed.side_channel.channel import Message, SideChannel

# -- Which attempt of the program a message about a failure belongs to --
# A program that catches a failure on all ranks makes another attempt. A message may arrive late, when its
# receiver is in a later attempt, or early, when its receiver has not caught the failure yet. So each
# carries the number of its attempt.


class Attempts:
    """Counts the failures that this rank has got over."""

    # A rank that had not raised when another one did, and caught it, counts on once it is in the same fit.

    def __init__(self) -> None:
        self.number = self.begun = 0  # of the attempt, the same on all ranks in it; fits begun by this rank
        self._over = -1  # the last attempt in which this rank raised something that the program has caught
        self._ahead: dict[int, int] = {}  # first fit of another rank's attempt -> number of the attempt

    def begin(self, *, after_failure: bool) -> None:
        """Count a fit that this rank begins; ``after_failure``: it has raised since it began the last one."""
        self._catch_up()
        if after_failure:
            self._over = self.number
            self.number += 1
        self.begun += 1
        self._catch_up()

    def other_began(self, number: int, begun: int) -> None:
        """Take notice that another rank has begun attempt ``number`` with its fit ``begun``."""
        self._ahead[begun] = max(number, self._ahead.get(begun, 0))
        self._catch_up()

    def is_over(self, number: int) -> bool:
        """Return whether this rank has raised in attempt ``number`` and goes on since then."""
        return number <= self._over

    def _catch_up(self) -> None:
        for begun in [begun for begun in self._ahead if begun <= self.begun]:
            self.number = max(self.number, self._ahead.pop(begun))


# -- Errors that all ranks raise alike, of which each rank keeps its own --
# The errors of this package are such: every rank decides the same from the same values. A rank that raises
# one lets the others know at once, so that it counts as a failure if it was raised on that rank alone after
# all.

_COMMON = "failure/common"
#: How long a report that is being written holds a forced end [s].
REPORT_LIMIT = 60.0


class _Raised(NamedTuple):
    attempt: int
    record: FailureRecord


class CommonErrors:
    """What this rank and the others have said of errors that all of them should raise."""

    def __init__(
        self,
        channel: SideChannel,
        attempts: Attempts,
        *,
        patience: Callable[[], float],  # how long the others may take to raise the same [s]
        posted: Callable[[int, int], None],  # gets a rank that has raised such an error, and its attempt
        alone: Callable[[FailureRecord], None],  # gets an error that this rank has not raised meanwhile
    ) -> None:
        self._channel, self._attempts = channel, attempts
        self._patience, self._on_posted, self._alone = patience, posted, alone
        self._raised: dict[int, _Raised] = {}
        self.raised_here = False
        #: Stops listening.
        self.remove = channel.on(_COMMON, self._take)

    def post(self, record: FailureRecord) -> None:
        """Let the others know that this rank raises such an error."""
        self.raised_here = True
        self._channel.post(_COMMON, [self._attempts.number, record.to_json()])

    def of(self, rank: int) -> FailureRecord | None:
        """Return the record of what a rank has raised, or ``None``."""
        raised = self._raised.get(rank)
        return None if raised is None or self._attempts.is_over(raised.attempt) else raised.record

    def any(self) -> FailureRecord | None:
        """Return the record of what some other rank has raised, or ``None``."""
        return next((record for rank in tuple(self._raised) if (record := self.of(rank))), None)

    def forget(self, rank: int) -> None:
        """Forget what a rank has raised, which goes on."""
        self._raised.pop(rank, None)

    def begin(self) -> None:
        """Begin the current attempt, to which errors may belong that other ranks have raised already."""
        self.raised_here = False
        for rank, raised in tuple(self._raised.items()):
            if self._attempts.is_over(raised.attempt):
                self.forget(rank)
            elif raised.attempt == self._attempts.number:
                self._wait_for_own(rank, raised)

    def _take(self, message: Message) -> None:
        attempt, text = message.body
        raised = _Raised(int(attempt), FailureRecord.from_json(text))
        # Also of an earlier attempt, which this rank has ended by the same error.
        self._on_posted(message.sender, raised.attempt)
        if self._attempts.is_over(raised.attempt):
            return
        self._raised[message.sender] = raised
        if raised.attempt <= self._attempts.number:
            self._wait_for_own(message.sender, raised)

    def _wait_for_own(self, rank: int, raised: _Raised) -> None:
        """Give this rank time to raise the same."""

        def wait() -> None:
            time.sleep(self._patience())
            wait_for_reports(REPORT_LIMIT)
            latest = self._raised.get(rank)
            still = latest is not None and latest.attempt == raised.attempt
            if still and not self._attempts.is_over(raised.attempt) and not self.raised_here:
                self._alone(raised.record)

        threading.Thread(target=wait, name="lockstep-common", daemon=True).start()


# -- Ranks that are gone, or silent, without having reported an error --

#: How long the process that started a rank may take to say how it ended [s].
BETTER_REPORT = 2.0


class LostPeers:
    """Makes records of the ranks that the side channel misses, and hands them on when nobody knows better."""

    # Whoever started a rank knows its signal or exit code, and gets a moment to send it. Of rank 0 that is
    # often nobody of ours.

    def __init__(
        self,
        channel: SideChannel,
        *,
        patience: Callable[[], float],  # how long a better report may take at most [s]
        then: Callable[[FailureRecord], None],  # called in a thread of its own, which may wait
    ) -> None:
        self._channel, self._patience, self._then = channel, patience, then
        self.any = False  # whether a rank is known to be gone
        channel.watch_peers(on_lost=self._gone, on_silent=self._silent)

    def _gone(self, rank: int, reason: str) -> None:
        self.any = True
        seconds = min(BETTER_REPORT, self._patience()) if rank != 0 else 0.0
        self._hand_on(rank, f"its process has ended without reporting an error ({reason})", seconds)

    def _silent(self, rank: int, seconds: float, reason: str) -> None:
        self._hand_on(rank, f"no heartbeat for {seconds:.0f} s: {reason}", 0.0)

    def _hand_on(self, rank: int, summary: str, seconds: float) -> None:
        """Hand on what the receiving thread has found, which must not wait itself."""
        host, pid = self._channel.process_of(rank)
        record = FailureRecord(rank, self._channel.world_size, host, pid, "vanished", summary)

        def wait() -> None:
            time.sleep(seconds)
            self._then(record)

        threading.Thread(target=wait, name="lockstep-lost", daemon=True).start()


# -- Which rank failed first, as all ranks agree, and the messages by which they do --
# =========================== ==========================================================================================
# ``failure``                 number of the attempt, record; from the rank whose claim to be the first has won
# ``failure/confirmed``       number of the attempt; from rank 0: it prints what is to be printed
# ``failure/armed``           number of the attempt that begins, number of its first fit; from a rank that goes on
# =========================== ==========================================================================================
#
# See the head of this file for what becomes of a message that is late or early.

_FAILED, _CONFIRMED, _FIRST = "failure", "failure/confirmed", "failure/first"
_ARMED = "failure/armed"


class FirstFailure:
    """The first failure of the current attempt, as far as this rank knows of it."""

    def __init__(
        self,
        channel: SideChannel,
        *,
        grace_period: Callable[[], float],  # from the message of a failure until a forced end [s]
        found: Callable[[FailureRecord], None],  # gets another rank's, once per attempt
    ) -> None:
        self._channel, self._grace_period, self._found = channel, grace_period, found
        self.record: FailureRecord | None = None
        self.raised_here = False  # in the current attempt; the owner sets it
        self._attempts = Attempts()
        self._known, self._confirmed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._early: dict[int, FailureRecord] = {}  # of attempts that this rank has not begun
        self.common = CommonErrors(
            channel,
            self._attempts,
            patience=lambda: grace_period() / 2,
            posted=self._confirm,
            alone=self.take,
        )
        self._remove = [
            channel.on(_FAILED, self._take_failed),
            channel.on(_CONFIRMED, self._take_confirmed),
            channel.on(_ARMED, self._take_armed),
            self.common.remove,
        ]

    @property
    def confirmed(self) -> bool:
        """Whether rank 0 has confirmed that it prints what is to be printed."""
        return self._confirmed.is_set()

    def begin(self) -> bool:
        """Begin a fit: what this rank raised before was caught by the program. Return whether it had."""
        with self._lock:
            raised, self.raised_here = self.raised_here, False
            self._attempts.begin(after_failure=raised)
            if raised:
                self.record = None
                self._known.clear()
                self._confirmed.clear()
            reached = [self._early.pop(n) for n in sorted(self._early) if n <= self._attempts.number]
        self.common.begin()
        for record in reached:
            self.take(record)
        if raised:
            self._channel.post(_ARMED, [self._attempts.number, self._attempts.begun])
            self._channel.flush(2.0)  # before this rank meets the others in a collective
        return raised

    def announce(self, record: FailureRecord) -> FailureRecord:
        """Claim that ``record`` is the first failure; if it is, send it to every rank. Return the first."""
        attempt = self._attempts.number
        claimed = self._channel.claim(f"{_FIRST}/{attempt}", record.to_json())  # one round trip to rank 0
        first = FailureRecord.from_json(claimed)
        with self._lock:
            if self.record is None and not self._is_over(first, attempt):
                self.record = first
        if first == record:
            self._channel.post(_FAILED, [attempt, first.to_json()])
            self._channel.flush(1.0)
        if first.rank != self._channel.rank:
            self.take(first, attempt)
        return first

    def take(self, record: FailureRecord, attempt: int | None = None) -> None:
        """Remember the first failure, and pass on that of another rank."""
        with self._lock:
            current = self._attempts.number
            attempt = current if attempt is None else attempt
            if self._is_over(record, attempt):
                return
            if attempt > current and not record.ended:
                self._early.setdefault(attempt, record)
                return
            if self._known.is_set():
                return
            self.record = first = self.record or record
            self._known.set()
        self._confirm(record.rank, attempt)
        if first.rank != self._channel.rank:
            self._found(first)

    def early(self, rank: int | None = None) -> FailureRecord | None:
        """Return the record of a failure in an attempt that this rank has not begun, of one rank or of any."""
        held = sorted(self._early.copy().items())
        return next((record for _, record in held if rank in (None, record.rank)), None)

    def wait(self, timeout: float) -> None:
        """Wait for the message of another rank's failure, up to ``timeout`` [s]."""
        self._known.wait(timeout)

    def wait_for_confirmation(self) -> bool:
        """Wait for rank 0's confirmation, up to a third of the grace period; return whether it has come."""
        return self._confirmed.wait(self._grace_period() / 3)

    def close(self) -> None:
        """Stop listening."""
        for remove in self._remove:
            remove()

    def _is_over(self, record: FailureRecord, attempt: int) -> bool:
        # A rank that has ended makes no other attempt.
        return self._attempts.is_over(attempt) and not record.ended

    def _confirm(self, rank: int, attempt: int) -> None:
        """Let a rank know that rank 0 prints what is to be printed, and knows of its failure."""
        if self._channel.rank == 0 and rank != 0:
            self._channel.post(_CONFIRMED, attempt, to=rank)

    def _take_failed(self, message: Message) -> None:
        attempt, record = message.body
        self.take(FailureRecord.from_json(record), int(attempt))

    def _take_confirmed(self, message: Message) -> None:
        with self._lock:
            if not self._attempts.is_over(message.body):
                self._confirmed.set()

    def _take_armed(self, message: Message) -> None:
        """A rank has caught its failure and goes on."""
        sender, (number, begun) = message.sender, message.body
        with self._lock:
            self._attempts.other_began(number, begun)
            self.common.forget(sender)
            self._early = {n: r for n, r in self._early.items() if n >= number or r.rank != sender}
            known = self.record is not None and self.record.rank == sender
            if known and not self.raised_here:
                self.record = None
                self._known.clear()
