"""Which lines are printed when: the decisions of rank-ordered logging, without any threads or clocks.

Lines of one place wait for each other. They are printed in rank order when every rank that will ever say
something there has done so, or when the first of them has waited long enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_lockstep.logs.lines import Line, Place, by_rank, fold

__all__ = ["Batch", "OnceBook", "LineOrdering"]

# How many places are remembered for lines that come after theirs were printed.
_REMEMBERED = 10_000


@dataclass(frozen=True)
class Batch:
    """Lines of one place, ready to be printed.

    Attributes:
        lines: In rank order, folded if so asked.
        missing: Ranks whose line did not come in time.
        late: Whether the other ranks' lines of this place were printed before.
        waited: How long the first line was held back [s].
    """

    lines: tuple[Line, ...]
    missing: tuple[int, ...] = ()
    late: bool = False
    waited: float = 0.0


@dataclass
class _Waiting:
    since: float
    lines: list[Line]
    came: set[int]


class LineOrdering:
    """Holds lines back until they can be printed in rank order.

    Args:
        ranks: The ranks whose lines are awaited.
        timeout: Longest time that a line waits for those of other ranks [s].
        folding: Whether equal lines become one.
    """

    def __init__(self, ranks: Iterable[int], *, timeout: float = 5.0, folding: bool = True) -> None:
        self.ranks = frozenset(ranks)
        self.timeout, self.folding = timeout, folding
        self._waiting: OrderedDict[Place, _Waiting] = OrderedDict()
        self._still_to_come: OrderedDict[Place, set[int]] = OrderedDict()
        self._levels: dict[tuple[int, str], int] = {}

    @property
    def holds_lines(self) -> bool:
        """Whether a line is held back."""
        return bool(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether a line of one rank would wait for the other ranks, whatever it says."""
        return not (self._waiting or self._levels or self._still_to_come)

    def add(self, line: Line, now: float) -> list[Batch]:
        """Take a line and return what can be printed now.

        Args:
            line: The line.
            now: A clock that never goes back [s].
        """
        for rank in line.ranks:
            if line.place.level < self._levels.get((rank, line.place.logger), 0):
                del self._levels[rank, line.place.logger]
        overdue = self._still_to_come.get(line.place)
        if overdue is not None and overdue.issuperset(line.ranks):
            overdue.difference_update(line.ranks)
            if not overdue:
                del self._still_to_come[line.place]
            return [Batch((line,), late=True)]
        waiting = self._waiting.setdefault(line.place, _Waiting(now, [], set()))
        waiting.lines.append(line)
        waiting.came.update(line.ranks)
        return self._complete([line.place], now)

    def hear_level(self, rank: int, logger: str, level: int) -> list[Batch]:
        """Note that a rank says nothing below ``level`` in a logger; return what need not wait any more."""
        self._levels[rank, logger] = level
        return self._complete([place for place in self._waiting if place.logger == logger], 0.0)

    def due(self, now: float) -> list[Batch]:
        """Return what has waited long enough."""
        places = [p for p, waiting in self._waiting.items() if now - waiting.since >= self.timeout]
        return [self._print(place, now) for place in places]

    def next_due(self) -> float | None:
        """Return when :meth:`due` will next have something [s], or ``None`` while nothing waits."""
        # Places are kept in the order of their first line, so the first one is due first.
        first = next(iter(self._waiting.values()), None)
        return None if first is None else first.since + self.timeout

    def flush(self, now: float) -> list[Batch]:
        """Return all that is held back."""
        return [self._print(place, now) for place in list(self._waiting)]

    def _complete(self, places: Iterable[Place], now: float) -> list[Batch]:
        return [self._print(place, now) for place in places if not self._awaited(place)]

    def _awaited(self, place: Place) -> set[int]:
        open_ranks = self.ranks - self._waiting[place].came
        return {r for r in open_ranks if self._levels.get((r, place.logger), 0) <= place.level}

    def _print(self, place: Place, now: float) -> Batch:
        missing = self._awaited(place)
        waiting = self._waiting.pop(place)
        if missing:
            self._still_to_come[place] = set(missing)
            while len(self._still_to_come) > _REMEMBERED:
                self._still_to_come.popitem(last=False)
        folds = self.folding and len(waiting.lines) > 1
        lines = fold(waiting.lines) if folds else sorted(waiting.lines, key=by_rank)
        return Batch(tuple(lines), tuple(sorted(missing)), waited=now - waiting.since)


class OnceBook:
    """Lets one of the equal lines of all ranks through.

    Each rank numbers its equal lines. The first line of a number waits a moment for those of other ranks, is
    printed with their numbers, and stands for all that come later.

    Args:
        gather_for: How long a line waits for its equals [s].
    """

    def __init__(self, *, gather_for: float = 0.3) -> None:
        self.gather_for = gather_for
        self._waiting: OrderedDict[tuple[str, int, str, int], _Waiting] = OrderedDict()
        self._printed: OrderedDict[tuple[str, int, str, int], None] = OrderedDict()

    @property
    def holds_lines(self) -> bool:
        """Whether a line is held back."""
        return bool(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether no line waits."""
        return not self._waiting

    def add(self, line: Line, now: float, *, printed: bool = False) -> list[Batch]:
        """Take a line.

        Args:
            line: The line; ``place.turn`` says how often its rank has said the same before.
            now: A clock that never goes back [s].
            printed: Whether the line was printed by whoever made it.
        """
        key = (line.place.logger, line.place.level, line.text, line.place.turn)
        if printed:
            self._remember(key)
            self._waiting.pop(key, None)
        elif key not in self._printed:
            waiting = self._waiting.setdefault(key, _Waiting(now, [], set()))
            waiting.lines.append(line)
        return []

    def due(self, now: float) -> list[Batch]:
        """Return what has waited long enough."""
        keys = [k for k, waiting in self._waiting.items() if now - waiting.since >= self.gather_for]
        return [self._print(key) for key in keys]

    def next_due(self) -> float | None:
        """Return when :meth:`due` will next have something [s], or ``None`` while nothing waits."""
        first = next(iter(self._waiting.values()), None)
        return None if first is None else first.since + self.gather_for

    def flush(self, now: float) -> list[Batch]:
        """Return all that is held back."""
        return [self._print(key) for key in list(self._waiting)]

    def _print(self, key: tuple[str, int, str, int]) -> Batch:
        self._remember(key)
        return Batch(tuple(fold(self._waiting.pop(key).lines)))

    def _remember(self, key: tuple[str, int, str, int]) -> None:
        self._printed[key] = None
        while len(self._printed) > _REMEMBERED:
            self._printed.popitem(last=False)
