"""How long this rank has waited in each of its incomplete collectives, and when it asks about one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning_lockstep.distributed.guard.calls.recorded import Outstanding

__all__ = ["Waits"]


class Waits:
    """The waits of this rank; ``None`` stands for a send or receive."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout  # when a wait is asked about, and after how long again [s]
        self._since: dict[Outstanding | None, float] = {}
        self._next_question: dict[Outstanding | None, float] = {}

    def update(
        self,
        outstanding: Sequence[Outstanding | None],
        now: float,
        ages: Callable[[], Mapping[Outstanding | None, float]],  # how long ago each was called [s]
    ) -> None:
        """Take note of what is incomplete now."""
        known = ages() if any(one not in self._since for one in outstanding) else {}
        self._since = {one: self._since.get(one, now - known.get(one, 0.0)) for one in outstanding}
        self._next_question = {one: at for one, at in self._next_question.items() if one in self._since}

    def put_off(self, seconds: float) -> None:
        """Leave out of all waits a time in which this process was stopped [s]."""
        self._since = {one: since + seconds for one, since in self._since.items()}

    def longest(self, now: float) -> float:
        """Return the longest wait [s]."""
        return max((now - since for since in self._since.values()), default=0.0)

    def due(self, now: float) -> list[tuple[Outstanding | None, float]]:
        """Return what is to be asked about now, each with how long this rank has waited [s]; once in each timeout."""
        due = [one for one in self._since if self._due_at(one) <= now]
        self._next_question |= dict.fromkeys(due, now + self._timeout)
        return [(one, now - self._since[one]) for one in due]

    def until_due(self, now: float) -> float:
        """Return how long until something is to be asked about [s]; infinity where nothing waits."""
        return min((self._due_at(one) - now for one in self._since), default=float("inf"))

    def _due_at(self, one: Outstanding | None) -> float:
        return max(self._since[one] + self._timeout, self._next_question.get(one, 0.0))
