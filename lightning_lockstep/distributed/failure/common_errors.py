"""Errors that all ranks raise alike, of which each rank keeps its own.

The errors of this package are such: every rank decides the same from the same values. A rank that raises one lets the
others know at once, so that it counts as a failure if it was raised on that rank alone after all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lightning_lockstep.distributed.failure.process_exit import wait_for_reports
from lightning_lockstep.distributed.failure.record import FailureRecord
from lightning_lockstep.distributed.side_channel.base import Message, SideChannel

__all__ = ["REPORT_LIMIT", "CommonErrors"]

_COMMON = "failure/common"
#: How long a report that is being written holds a forced end [s].
REPORT_LIMIT = 60.0


class CommonErrors:
    """What this rank and the others have said of errors that all of them should raise.

    Args:
        channel: The side channel of the run.
        patience: Returns how long the others may take to raise the same [s].
        posted: Called with the number of a rank that has raised such an error.
        alone: Called with the record of an error that this rank has not raised meanwhile.

    Attributes:
        raised_here: Whether this rank has raised one.

    Ranks: one object on every rank.
    """

    def __init__(
        self,
        channel: SideChannel,
        *,
        patience: Callable[[], float],
        posted: Callable[[int], None],
        alone: Callable[[FailureRecord], None],
    ) -> None:
        self._channel, self._patience, self._on_posted, self._alone = channel, patience, posted, alone
        self._records: dict[int, FailureRecord] = {}
        self._forgotten = 0  # how often
        self.raised_here = False
        #: Stops listening.
        self.remove = channel.on(_COMMON, self._take)

    def post(self, record: FailureRecord) -> None:
        """Let the others know that this rank raises such an error.

        Ranks: a rank that raises one; sends a message.
        """
        self.raised_here = True
        self._channel.post(_COMMON, record.to_json())

    def of(self, rank: int) -> FailureRecord | None:
        """Return the record of what a rank has raised, or ``None``."""
        return self._records.get(rank)

    def any(self) -> FailureRecord | None:
        """Return the record of what some other rank has raised, or ``None``."""
        return next(iter(self._records.values()), None)

    def forget(self, rank: int | None = None) -> None:
        """Forget what a rank has raised, which goes on; by default what all of them have, this one included."""
        if rank is not None:
            self._records.pop(rank, None)
            return
        self.raised_here = False
        self._forgotten += 1
        self._records.clear()

    def _take(self, message: Message) -> None:
        record = FailureRecord.from_json(message.body)
        self._records[message.sender] = record
        self._on_posted(message.sender)
        forgotten = self._forgotten

        def wait_for_own() -> None:
            time.sleep(self._patience())
            wait_for_reports(REPORT_LIMIT)
            if self._forgotten == forgotten and not self.raised_here and message.sender in self._records:
                self._alone(record)

        threading.Thread(target=wait_for_own, name="lockstep-common", daemon=True).start()
