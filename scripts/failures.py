"""Print each failed test of pytest's JUnit reports, with the first lines of its error.

A log of CI is often read, or kept, from its end: there these lines stand together.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

LONGEST = 200  # characters of an error


def failures(report: Path) -> Iterator[str]:
    """Give ``file::test: error`` for each test of ``report`` that failed or could not run."""
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            for found in case.iterfind(kind):
                said = " ".join((found.get("message") or found.text or "").split())
                if len(said) > LONGEST:
                    said = f"{said[:LONGEST]} ..."
                yield f"{kind.upper()} {case.get('classname')}::{case.get('name')}: {said}"


def main(reports: list[str]) -> None:
    """Print what failed in each report that is named."""
    for report in map(Path, reports):
        if not report.exists():
            print(f"no report {report}: pytest did not come to its end")
            continue
        for line in failures(report):
            print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
