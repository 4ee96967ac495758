"""Which lines are printed when: the decisions of rank-ordered logging, without any threads or clocks.

Lines of one call site wait for each other. They are printed in rank order when every rank that will ever log
there has done so, or when the first of them has waited long enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from lightning_lockstep.logs.lines import Line, by_rank, merge_equal

__all__ = ["Batch", "LineOrdering", "same_text"]

# How many printed keys are remembered for lines that come after theirs were printed.
_REMEMBERED = 10_000


@dataclass(frozen=True)
class Batch:
    """Lines that belong together, ready to be printed."""

    lines: tuple[Line, ...]  # in rank order, equal ones merged if so asked
    missing: tuple[int, ...] = ()  # ranks whose line did not come in time
    late: bool = False  # the other ranks' lines were printed before
    waited: float = 0.0  # how long the first line was held back [s]


@dataclass
class _Waiting:
    since: float
    lines: list[Line]
    ranks: set[int]


class LineOrdering:
    """Holds lines back until they can be printed in rank order."""

    def __init__(
        self,
        ranks: Iterable[int],  # whose lines are awaited
        *,
        timeout: float = 5.0,  # longest time that a line waits for those of other ranks [s]
        merging: bool = True,  # whether equal lines become one
        # Of lines that belong together; by default those of the same call.
        key: Callable[[Line], Hashable] = attrgetter("site"),
    ) -> None:
        self.ranks = frozenset(ranks)
        self.timeout, self.merging = timeout, merging
        self._key = key
        self._waiting: OrderedDict[Hashable, _Waiting] = OrderedDict()
        self._overdue: OrderedDict[Hashable, set[int]] = OrderedDict()
        self._levels: dict[tuple[int, str], int] = {}

    @property
    def holds_lines(self) -> bool:
        """Whether a line is held back."""
        return bool(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether a line of one rank would wait for the other ranks, whatever its text."""
        return not (self._waiting or self._levels or self._overdue)

    def add(self, line: Line, now: float, *, waits: bool = True) -> list[Batch]:
        """Take a line, at ``now`` [s] of a clock that never goes back, and return what can be printed."""
        for rank in line.ranks:
            if line.site.level < self._levels.get((rank, line.site.logger), 0):
                del self._levels[rank, line.site.logger]
        key = self._key(line)
        overdue = self._overdue.get(key)
        if overdue is not None and overdue.issuperset(line.ranks):
            overdue.difference_update(line.ranks)
            if not overdue:
                del self._overdue[key]
            return [Batch((line,), late=True)]
        waiting = self._waiting.setdefault(key, _Waiting(now, [], set()))
        waiting.lines.append(line)
        waiting.ranks.update(line.ranks)
        return [] if waits and self._awaited(waiting) else [self._print(key, now)]

    def note_level(self, rank: int, logger: str, level: int) -> list[Batch]:
        """Note that a rank logs nothing below ``level`` in a logger; return what need not wait any more."""
        self._levels[rank, logger] = level
        complete = [key for key, waiting in self._waiting.items() if not self._awaited(waiting)]
        return [self._print(key, 0.0) for key in complete]

    def due(self, now: float) -> list[Batch]:
        """Return what has waited long enough."""
        keys = [key for key, waiting in self._waiting.items() if now - waiting.since >= self.timeout]
        return [self._print(key, now) for key in keys]

    def next_due(self) -> float | None:
        """Return when :meth:`due` will next have something [s], or ``None`` while nothing waits."""
        # They are kept in the order of their first line, so the first one is due first.
        first = next(iter(self._waiting.values()), None)
        return None if first is None else first.since + self.timeout

    def flush(self, now: float) -> list[Batch]:
        """Return all that is held back."""
        return [self._print(key, now) for key in list(self._waiting)]

    def _awaited(self, waiting: _Waiting) -> set[int]:
        site = waiting.lines[0].site
        absent = self.ranks - waiting.ranks
        return {rank for rank in absent if self._levels.get((rank, site.logger), 0) <= site.level}

    def _print(self, key: Hashable, now: float) -> Batch:
        waiting = self._waiting.pop(key)
        missing = self._awaited(waiting)
        if missing:
            self._overdue[key] = set(missing)
            while len(self._overdue) > _REMEMBERED:
                self._overdue.popitem(last=False)
        merges = self.merging and len(waiting.lines) > 1
        lines = merge_equal(waiting.lines) if merges else sorted(waiting.lines, key=by_rank)
        return Batch(tuple(lines), tuple(sorted(missing)), waited=now - waiting.since)


def same_text(line: Line) -> Hashable:
    """Return a key under which equal lines of all ranks belong together, wherever they were logged."""
    return line.site.logger, line.site.level, line.text, line.site.repeat
