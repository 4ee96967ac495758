"""Prints all imitated machines with what the doctor finds on them, and whether that is what is expected."""

from __future__ import annotations

import sys

from rich.text import Text

from lightning_lockstep.doctor.table import console, print_fixes, print_result
from tests.common.doctor.machines import cases, is_found


def main() -> int:
    to, wrong = console(), 0
    for number, case in enumerate(cases(), 1):
        to.print(Text(f"\n{number}. {case.name}: {case.about}", style="bold"))
        results = [case.result(check) for check in case.expected]
        for result in results:
            print_result(to, result)
            missing = [
                e for e in case.expected[result.check] if not any(is_found(e, f) for f in result.findings)
            ]
            wrong += len(missing)
            for expected in missing:
                to.print(Text(f"expected and not found: {expected}", style="bold red"))
        print_fixes(to, results)
    to.print(f"\n{len(cases())} imitated machines, {wrong} expected findings missing")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
