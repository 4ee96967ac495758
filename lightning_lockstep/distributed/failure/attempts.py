"""Which attempt of the program a message about a failure belongs to.

A program that catches a failure on all ranks makes another attempt. A message may arrive late, when its receiver is in
a later attempt, or early, when its receiver has not caught the failure yet. So each carries the number of its attempt.
"""

from __future__ import annotations

__all__ = ["Attempts"]


class Attempts:
    """Counts the failures that this rank has got over.

    A rank that had not raised when another one did, and caught it, counts on once it is in the same fit.
    """

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
