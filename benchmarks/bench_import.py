"""What `import lightning_lockstep` takes beyond `import lightning.pytorch`."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.engine import Comparison, Report, interleave

LIGHTNING = "lightning.pytorch"
BOTH = "and lightning_lockstep"

PROBE = """
import time
started = time.perf_counter()
import lightning.pytorch
between = time.perf_counter()
{then}
print(between - started, time.perf_counter() - started)
"""


def measure(then: str) -> tuple[float, float]:
    """Seconds of `import lightning.pytorch`, and of that with what follows, in a fresh interpreter."""
    command = [sys.executable, "-c", PROBE.format(then=then)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    first, total = map(float, done.stdout.split())
    return first, total


def run(quick: bool) -> Report:
    rounds = 2 if quick else 5
    within: dict[str, list[float]] = {LIGHTNING: [], BOTH: []}

    def with_ours() -> float:
        first, total = measure("import lightning_lockstep")
        within[LIGHTNING].append(first)
        within[BOTH].append(total)
        return total

    measure("import lightning_lockstep")  # fills the page cache and writes the bytecode
    separate = interleave({LIGHTNING: lambda: measure("")[1], BOTH: with_ours}, rounds=rounds, progress=print)
    return Report(
        title="Import time",
        tables=[
            Comparison(
                "in one interpreter: before and after our import",
                within,
                peer=LIGHTNING,
                at_most={BOTH: 50.0},
                by="difference",
            ),
            Comparison(
                "in interpreters of their own, interleaved",
                separate,
                peer=LIGHTNING,
                by="difference",
            ),
        ],
        notes=[
            "The goal is judged on the first table: the second holds all the noise of Lightning's own import."
        ],
    )
