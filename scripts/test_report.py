"""What a run of the tests came to, from pytest's JUnit reports: `scripts/test` prints it last.

    python scripts/test_report.py REPORT...          counts, slowest tests, and all that is to be looked at; 1: failed
    python scripts/test_report.py --twice REPORT     the tests that run once more, alone, by the names that pytest takes

Beside `run.xml` may stand `run.xml.code` (pytest's exit code) and `run.xml.alone` (the report of the second run). A
test has failed if it failed both times; one that passed only the second time is named and counted, and so is a test of
a default folder that took longer than its budget. Each default folder also has a budget. How long tests take depends on
the machine: more than three times the budget of a folder is a failure, and only in continuous integration. There a
test also fails that was skipped for another reason than a missing GPU, TPU or kind of CPU.
"""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 200  # characters of an error
TWICE = 20  # tests; more have one cause, which running them again does not mend
BUDGET = 15.0  # seconds: tests/harness/costs.py
#: Seconds of all tests of a default folder together: 2, 3 and 3 minutes of the three processes that share two cores.
FOLDERS = {"tests/unit/": 360.0, "tests/ranks/": 540.0, "tests/programs/": 540.0}
FAR_ABOVE = 3  # times its budget a folder may take before continuous integration fails
#: What cannot be installed: not every machine has it.
EXCUSED = ("GPU", "TPU", "CUDA", "this CPU")


@dataclass(frozen=True)
class Case:
    """A test of a report."""

    name: str
    seconds: float
    failure: str = ""
    skipped: str = ""

    @property
    def over_budget(self) -> bool:
        return self.name.startswith(tuple(FOLDERS)) and self.seconds > BUDGET


def cases(report: Path) -> list[Case]:
    """Read a report; a test that failed and whose teardown failed too stands there twice, and counts once."""
    found: dict[str, Case] = {}
    if not report.exists():
        return []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{file_of(case.get('classname') or '')}::{case.get('name')}"
        failure = skipped = ""
        for element in case:
            said = " ".join((element.get("message") or element.text or "").split())
            if element.tag in ("failure", "error"):
                failure = f"{element.tag.upper()} {said[:LONGEST]}{' ...' if len(said) > LONGEST else ''}"
            elif element.tag == "skipped":
                skipped = said
        before = found.get(name, Case(name, 0.0))
        seconds = before.seconds + float(case.get("time") or 0)
        found[name] = Case(name, seconds, before.failure or failure, before.skipped or skipped)
    return list(found.values())


def file_of(module: str) -> str:
    """Return the file of `tests.unit.test_x`, or of a class in it, as pytest names it."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[:end]) + ".py"
        if (ROOT / path).exists():
            return "::".join([path, *parts[end:]])
    return module


def beside(report: Path, suffix: str) -> Path:
    return report.with_name(report.name + suffix)


def twice(report: Path) -> list[str]:
    """Return the names of the tests that run again."""
    names = [case.name for case in cases(report) if case.failure]
    return names if len(names) <= TWICE else []


def show(title: str, lines: list[str]) -> None:
    if lines:
        print(f"\n{title}:", *lines, sep="\n  ")


def summary(reports: list[Path]) -> int:
    """Print what the runs came to; returns the exit code."""
    strict = bool(os.environ.get("CI"))
    all_cases, failed, unsteady, slow, broken = [], [], [], [], []
    for report in reports:
        first, second = cases(report), {case.name: case for case in cases(beside(report, ".alone"))}
        all_cases += first
        code = beside(report, ".code")
        if not first or (code.exists() and int(code.read_text()) > 1):
            broken.append(f"{report.name}: pytest did not come to its end; its last lines are above")
        for case in first:
            again = second.get(case.name)
            if case.failure and (again is None or again.failure):
                failed.append(f"{case.name}\n      {case.failure}")
            elif case.failure:
                unsteady.append(f"{case.name}\n      {case.failure}")
            if case.over_budget:
                slow.append(f"{case.seconds:5.1f} s {case.name}")
    skipped = Counter(case.skipped for case in all_cases if case.skipped)
    missing = sum(n for reason, n in skipped.items() if not any(word in reason for word in EXCUSED))
    slowest = sorted(all_cases, key=lambda case: -case.seconds)[:20]
    show("the slowest", [f"{case.seconds:5.1f} s {case.name}" for case in slowest if case.seconds > 1])
    show("skipped", [f"{n} x {reason}" for reason, n in sorted(skipped.items())])
    show(f"longer than the budget of {BUDGET:g} s of a default test, beside others", slow)
    took = {name: sum(one.seconds for one in all_cases if one.name.startswith(name)) for name in FOLDERS}
    lines = [f"{took[name]:4.0f} s of {FOLDERS[name]:.0f} {name}" for name in FOLDERS if took[name]]
    show("seconds of each default folder, and its budget", lines)
    too_long = [name for name in FOLDERS if took[name] > FAR_ABOVE * FOLDERS[name]]
    if strict:
        show(f"longer than {FAR_ABOVE} times the budget", too_long)
    show("failed beside others, passed alone: look into it", unsteady)
    show("failed", failed)
    show("cut short", broken)
    counts = [
        f"{len(all_cases) - sum(skipped.values()) - len(failed) - len(unsteady)} passed",
        f"{sum(skipped.values())} skipped ({missing} of them for want of something that can be installed)",
        f"{len(slow)} over budget",
        f"{len(unsteady)} passed only alone",
        f"{len(failed)} failed",
    ]
    print(f"\ntest: {', '.join(counts)}")
    return int(bool(failed or broken or (strict and (missing or too_long))))


if __name__ == "__main__":
    if sys.argv[1] == "--twice":
        print(*twice(Path(sys.argv[2])), sep="\n", end="\n" if twice(Path(sys.argv[2])) else "")
    else:
        sys.exit(summary([Path(name) for name in sys.argv[1:]]))
