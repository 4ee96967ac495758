"""What the command lines of random runs have in common: a seed stands for a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.harness.children import put_on_path


def parse(parser: argparse.ArgumentParser, runs: int) -> argparse.Namespace:
    """Return the command line, with the ``seeds`` of its runs; what it starts finds this source tree."""
    parser.add_argument("--runs", type=int, default=runs, help=f"number of runs (default: {runs})")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run; the others follow it")
    parser.add_argument("--run", type=int, metavar="SEED", help="this one run alone")
    given = parser.parse_args()
    given.seeds = [given.run] if given.run is not None else range(given.seed, given.seed + given.runs)
    put_on_path(Path(__file__).parents[1])  # before what is installed
    return given
