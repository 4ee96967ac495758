"""Runs random programs of collectives under the guard: always the right error, never a hang, never a false alarm.

python -m tests.common.distributed.guard.random_programs --programs 300 --seed 0 --guard watch --jobs 2
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightning_lockstep._text import plain_table
from tests.common.distributed.guard.program_expectation import Guard, expected
from tests.common.distributed.guard.program_model import DIVERGENCES, Kind, Program, random_program
from tests.common.distributed.guard.program_rank import run_programs
from tests.common.distributed.guard.program_verdict import faults_of, kind_of
from tests.helpers import run_ranks_raw

__all__ = ["Result", "check", "launches", "main"]

#: The guards that have a simulation of what must happen.
MODES: tuple[Guard, ...] = ("watch", "verify")
# Programs without divergence that one launch runs one after the other.
_AT_ONCE = 20
_STALL_TIMEOUT, _GRACE_PERIOD, _LIMIT = 2.5, 8.0, 120.0
# How long the other ranks may take once one has failed [s]; a stopped one never ends by itself.
_LINGER = 30.0


@dataclass(frozen=True)
class Result:
    """What became of one program."""

    program: Program  # the program
    kind: str  # how it diverged, and whether that could be found at all
    faults: Sequence[str]  # what was wrong; nothing where all was right


def check(programs: Sequence[Program], guard: Guard = "watch") -> list[Result]:
    """Run one program, or several without divergence for one world size, and judge what became of it."""
    outcomes = run_ranks_raw(
        programs[0].world_size,
        run_programs,
        list(programs),
        guard,
        _STALL_TIMEOUT,
        _GRACE_PERIOD,
        timeout=_LIMIT,
        linger=_LINGER,
        allow_timeout=True,
    )
    results = []
    for program in programs:
        wanted = expected(program, guard)
        results.append(Result(program, kind_of(program, wanted), faults_of(program, wanted, outcomes, guard)))
    return results


def launches(seeds: Sequence[int], kind: Kind | None) -> Iterator[list[Program]]:
    """Return the programs of some numbers, those together that one launch can run."""
    programs = [random_program(seed, kind) for seed in seeds]
    if kind is not None:
        yield from ([program] for program in programs)
        return
    for world_size in (2, 3, 4):
        alike = [program for program in programs if program.world_size == world_size]
        yield from (alike[start : start + _AT_ONCE] for start in range(0, len(alike), _AT_ONCE))


def _all_launches(count: int, seed: int, kinds: Sequence[Kind | None]) -> list[list[Program]]:
    """Return launches of so many programs: a third without divergence, the others of each kind alike."""
    clean = (count // 3 if len(kinds) > 1 else count) if None in kinds else 0
    found = list(launches(range(seed, seed + clean), None)) if clean else []
    diverging = [kind for kind in kinds if kind is not None]
    for index in range(count - clean):
        kind = diverging[index % len(diverging)]
        found += launches([seed + index // len(diverging)], kind)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run programs as the command line says, print a table, and return 1 if any was judged wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first program of each kind")
    parser.add_argument("--guard", choices=MODES, default="watch")
    parser.add_argument("--jobs", type=int, default=2, help="launches at a time")
    parser.add_argument("--kind", choices=("none", *DIVERGENCES), nargs="*", help="these divergences alone")
    given = parser.parse_args(arguments)
    kinds = [None if kind == "none" else kind for kind in given.kind or ("none", *DIVERGENCES)]
    todo = _all_launches(given.programs, given.seed, kinds)
    results: list[Result] = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for several in pool.map(lambda programs: check(programs, given.guard), todo):
            results += several
            for result in several:
                _show(result)
    print(_table(results), flush=True)
    return int(any(result.faults for result in results))


def _show(result: Result) -> None:
    if result.faults:
        kind = result.program.divergence.kind if result.program.divergence else "none"
        print(f"WRONG: --programs 1 --kind {kind} --seed {result.program.seed}")
        print("\n".join(f"    {line}" for fault in result.faults for line in fault.splitlines()), flush=True)


def _table(results: Sequence[Result]) -> str:
    every = Counter(result.kind for result in results)
    wrong = {kind: [r.program.seed for r in results if r.kind == kind and r.faults] for kind in every}
    rows = [
        (kind, count, count - len(wrong[kind]), ", ".join(map(str, wrong[kind])))
        for kind, count in sorted(every.items())
    ]
    rows.append(("all", len(results), len(results) - sum(map(len, wrong.values())), ""))
    return plain_table(("divergence", "programs", "right", "seeds of wrong ones"), rows)


if __name__ == "__main__":
    sys.exit(main())
