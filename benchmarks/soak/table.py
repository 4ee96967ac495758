"""The result of a soak, by fault."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.soak.outcome import Observed
from benchmarks.soak.plan import FAULTS, Plan
from benchmarks.soak.rules import known

__all__ = ["Result", "stock_table", "table"]


class Result(NamedTuple):
    """A run and what came of it."""

    plan: Plan
    seen: Observed
    differences: list[str]

    @property
    def verdict(self) -> str:
        """``as expected``, ``known`` (another, for a known reason), or ``not as expected``."""
        if not self.differences:
            return "as expected"
        all_known = all(known(self.plan, difference) for difference in self.differences)
        return "known" if all_known else "not as expected"


def table(results: Sequence[Result]) -> str:
    """Return a table: by fault the runs, the verdicts and how long they took from the fault to the end."""
    verdicts = ("as expected", "known", "not as expected")
    rows = [("fault", "runs", *verdicts, "seconds: median", "max")]
    for fault in [*FAULTS, "all"]:
        of_it = [result for result in results if fault in (result.plan.fault, "all")]
        if of_it:
            seconds = [result.seen.seconds for result in of_it]
            counts = [str(sum(result.verdict == verdict for result in of_it)) for verdict in verdicts]
            median, most = f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"
            rows.append((fault, str(len(of_it)), *counts, median, most))
    return _aligned(rows)


def stock_table(results: Sequence[Result]) -> str:
    """Return a table of what came of each run under Lightning's own strategy."""
    rows = [("fault", "launch", "rank", "outcome", "seconds", "left running")]
    order = list(FAULTS)
    for plan, seen, _ in sorted(results, key=lambda result: order.index(result.plan.fault)):
        outcome = "hung" if seen.script.timed_out else f"exit code {seen.script.returncode}"
        left = str(len(seen.script.leftovers) or "")
        rows.append((plan.fault, plan.launch, str(plan.target), outcome, f"{seen.seconds:.1f}", left))
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
