"""What a rank that runs out of memory in mid-run sends to the others, at no cost to a step.

The others wait in their backward for the gradients that this rank owes. It posts its notice, and sends the
gradients only once every rank has acknowledged it, so each finds the notice when its backward returns: all
take the same decision in the same step, and a step without a notice costs one attribute read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from lightning_lockstep.distributed import Communicator, Message

__all__ = ["Notice", "Notices"]

_NOTICE, _ACKNOWLEDGED, _COUNT = "batch_size/notice", "batch_size/acknowledged", "batch_size/count"


@dataclass(frozen=True)
class Notice:
    """A decision that all ranks take at the end of the same optimizer step."""

    step: int  # of the optimizer, counted alike on every rank
    fatal: bool  # the run ends; otherwise the step is left out
    text: str  # what happened, with the rank


class Notices:
    """Sends and receives notices."""

    def __init__(self, communicator: Communicator, on_count: Callable[[int, str], None]) -> None:
        self._communicator = communicator
        self._channel = communicator.side_channel  # opened here, by all ranks together
        self._waiting: set[int] = set()
        self._all_acknowledged = threading.Event()
        # By step, and then by rank: the next step's may come before this one's was read, and where two ranks
        # ran out in one step all must give the same reason.
        self._notices: dict[int, dict[int, Notice]] = {}
        self._remove = [
            self._channel.on(_NOTICE, self._receive),
            self._channel.on(_ACKNOWLEDGED, self._acknowledged),
            self._channel.on(_COUNT, lambda message: on_count(message.sender, str(message.body))),
        ]

    def count(self, text: str) -> None:
        """Let rank 0 know that this rank split or skipped a batch."""
        self._channel.post(_COUNT, text, to=0)

    def send(self, notice: Notice, timeout: float = 60.0) -> bool:  # timeout [s]
        """Make every rank take the decision, before sending what is owed; return whether all acknowledged."""
        self._keep(self._communicator.rank, notice)
        others = set(range(self._communicator.world_size)) - {self._communicator.rank}
        if not others:
            return True
        self._waiting = others
        self._all_acknowledged.clear()
        self._channel.post(_NOTICE, [notice.step, notice.fatal, notice.text])
        return self._all_acknowledged.wait(timeout)

    @property
    def none(self) -> bool:
        """Whether there is no notice for any step."""
        return not self._notices

    def at(self, step: int) -> Notice | None:
        """Return the notice for this optimizer step, once; of several the lowest rank's."""
        notices = self._notices.pop(step, None)
        return None if notices is None else notices[min(notices)]

    def close(self) -> None:
        for remove in self._remove:
            remove()

    def _receive(self, message: Message) -> None:
        self._keep(message.sender, Notice(*message.body))
        self._channel.post(_ACKNOWLEDGED, to=message.sender)

    def _acknowledged(self, message: Message) -> None:
        self._waiting.discard(message.sender)
        if not self._waiting:
            self._all_acknowledged.set()

    def _keep(self, rank: int, notice: Notice) -> None:
        # One operation each under the interpreter's lock: the receiving thread and this one both come here.
        self._notices.setdefault(notice.step, {})[rank] = notice
