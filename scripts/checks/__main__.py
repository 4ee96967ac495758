"""What the repository holds itself to, beside format, types and tests: `python scripts/checks [NAME ...]`.

Each other file here is a check, and the first line of its docstring says of what: its function `problems` yields a text
for each thing that is wrong, `file:line: what is wrong and what is expected`. Steps of `scripts/check`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
CHECKS = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("__main__", "repository"))


def main(names: list[str]) -> int:
    """Run the checks of these names, or all; return the exit code."""
    # Not in front: the installed package is what is imported, and `benchmarks` is here only.
    sys.path.append(str(HERE.parents[1]))
    if unknown := sorted({*names} - {*CHECKS}):
        print(f"checks: there is no check {', '.join(unknown)}; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    count = 0
    for name in names or CHECKS:
        for problem in importlib.import_module(name).problems():
            print(f"{problem} [{name}]")
            count += 1
    print(f"{len(names or CHECKS)} checks, {count} problems")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
