"""Many random runs: ``python -m tests.models.replicas --divergences 200 --healthy 200``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.harness import run_ranks
from tests.models.replicas.fits import fits
from tests.models.replicas.random_runs import HSDP_RANKS, RANKS, divergences, healthy, what_is_wrong

_AT_ONCE = 20


def main() -> int:
    """Run them, print what went wrong and a table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.replicas", description=__doc__)
    parser.add_argument("--divergences", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hsdp", action="store_true", help="two copies of a divided model")
    given = parser.parse_args()
    ranks = HSDP_RANKS if given.hsdp else RANKS
    cases = [
        *divergences(given.divergences, given.seed, hsdp=given.hsdp),
        *healthy(given.healthy, given.seed, hsdp=given.hsdp),
    ]
    counts: Counter[tuple[str, bool]] = Counter()
    for start in range(0, len(cases), _AT_ONCE):
        some = cases[start : start + _AT_ONCE]
        of_ranks = run_ranks(ranks, fits, some, backend="gloo", timeout=600)
        for case, *outcomes in zip(some, *of_ranks, strict=True):
            wrong = what_is_wrong(case, outcomes)
            counts[case.name.partition(": ")[2] + ("" if case.fault else " (healthy)"), bool(wrong)] += 1
            if wrong:
                print(f"{case}\n  {wrong}\n", flush=True)
    for kind in dict.fromkeys(kind for kind, _ in counts):
        print(f"{kind:32} {counts[kind, False]:4} right, {counts[kind, True]:3} wrong")
    wrong = sum(count for (_, is_wrong), count in counts.items() if is_wrong)
    print(f"{len(cases)} runs on {ranks} ranks, {wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
