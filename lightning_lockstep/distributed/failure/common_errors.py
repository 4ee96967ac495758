"""Errors that all ranks raise alike, of which each rank keeps its own.

The errors of this package are such: every rank decides the same from the same values. A rank that raises one lets the
others know at once, so that it counts as a failure if it was raised on that rank alone after all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from lightning_lockstep.distributed.failure.attempts import Attempts
from lightning_lockstep.distributed.failure.process_exit import wait_for_reports
from lightning_lockstep.distributed.failure.record import FailureRecord
from lightning_lockstep.distributed.side_channel.base import Message, SideChannel

__all__ = ["REPORT_LIMIT", "CommonErrors"]

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
