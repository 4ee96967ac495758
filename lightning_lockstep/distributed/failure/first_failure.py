"""Which rank failed first, as all ranks agree, and the messages by which they do.

=========================== ==========================================================================================
``failure``                 number of the attempt, record; from the rank whose claim to be the first has won
``failure/confirmed``       number of the attempt; from rank 0: it prints what is to be printed
``failure/armed``           number of the attempt that begins, number of its first fit; from a rank that goes on
=========================== ==========================================================================================

See :mod:`~lightning_lockstep.distributed.failure.attempts` for what becomes of a message that is late or early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_lockstep.distributed.failure.attempts import Attempts
from lightning_lockstep.distributed.failure.common_errors import CommonErrors
from lightning_lockstep.distributed.failure.record import FailureRecord
from lightning_lockstep.distributed.side_channel.base import Message, SideChannel

__all__ = ["FirstFailure"]

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
