"""The same topic on two checkouts of the project, in turn: did a change make anything slower?

Each round runs the topic's quick form once on either checkout, in processes of their own, and the order
changes from round to round. What is compared is what the topic itself compares: the paired ratio (or
difference) of each variant to its peer, so that a slow minute of the machine hits both alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine import Report, Spread, Table

_BEFORE, _AFTER = "before", "after"

# Runs in the checkout's own folder, on its own benchmarks and its own package; prints one line of JSON last.
_PROGRAM = """
import importlib, json, sys
from benchmarks.engine import Comparison
report = importlib.import_module("benchmarks.bench_" + sys.argv[1]).run(True)
print("\\n" + json.dumps([
    [table.title, table.by, name, table.against_peer(name).median]
    for table in report.tables if isinstance(table, Comparison)
    for name in table.samples if name != table.peer
]))
"""


#: Table title, ``ratio`` or ``difference``, variant.
_Key = tuple[str, str, str]


@dataclass(frozen=True)
class _Row:
    key: _Key
    before: list[float]
    after: list[float]

    def cells(self) -> list[str]:
        _, by, variant = self.key
        pairs = list(zip(self.after, self.before, strict=True))
        change = Spread.of([a / b for a, b in pairs] if by == "ratio" else [a - b for a, b in pairs])
        same = 1.0 if by == "ratio" else 0.0
        slower = "slower" if change.low > same else "faster" if change.high < same else "no difference"
        return [
            variant,
            f"{statistics.median(self.before):.3f}",
            f"{statistics.median(self.after):.3f}",
            f"{change.median:.3f}",
            f"{change.low:.3f} to {change.high:.3f}",
            slower,
        ]


def run_against(
    topic: str, before: Path, after: Path, *, rounds: int, progress: Callable[[str], None] = print
) -> Report:
    """Run a topic on two checkouts in turn and compare what it found."""
    # Returns: one table for each comparison of the topic.
    found: dict[_Key, dict[str, list[float]]] = {}
    for number in range(rounds):
        sides = [(_BEFORE, before), (_AFTER, after)]
        for side, checkout in sides if number % 2 == 0 else reversed(sides):
            progress(f"round {number + 1}/{rounds}: {side}")
            for title, by, variant, value in _measure(topic, checkout):
                values = found.setdefault((title, by, variant), {_BEFORE: [], _AFTER: []})
                values[side].append(value)
    rows = [
        _Row(key, values[_BEFORE], values[_AFTER])
        for key, values in found.items()
        if len(values[_BEFORE]) == len(values[_AFTER]) == rounds
    ]
    titles = dict.fromkeys((row.key[0], row.key[1]) for row in rows)
    tables = [
        Table(
            title,
            ["variant", f"{by} before", f"{by} after", "change", "middle half", "verdict"],
            [row.cells() for row in rows if row.key[:2] == (title, by)],
        )
        for title, by in titles
    ]
    notes = [
        f"{rounds} rounds; each runs the topic's quick form once before and once after, in turn.",
        "`before` and `after` are the topic's own ratio (or difference) of a variant to its peer, the median over"
        " the rounds; `change` is after / before (or after - before) within a round. `slower` and `faster` mean"
        " that the middle half of the changes lies on one side.",
    ]
    left_out = [f"{title}: {variant}" for (title, _, variant) in found.keys() - {row.key for row in rows}]
    if left_out:
        notes.append("Only one of the two has, and so not compared: " + "; ".join(sorted(left_out)) + ".")
    return Report(f"{topic}, before and after", tables, notes)


def _measure(topic: str, checkout: Path) -> list[tuple[str, str, str, float]]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, topic],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    return [(title, by, variant, float(value)) for title, by, variant, value in rows]
