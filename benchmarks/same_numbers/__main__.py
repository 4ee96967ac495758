"""The command line; see the docstring of the package."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from benchmarks.random_runs import parse
from benchmarks.same_numbers.program import STOCK, STRATEGIES, Program, draw, impossible, program_of
from benchmarks.same_numbers.run import Result, check, shrink

#: Programs after which those that failed are shown.
_AT_ONCE = 100


def main() -> int:
    """Run the programs that the command line asks for; the exit code is 1 if one is wrong."""
    given = _arguments()
    programs, results = _programs(given), list[Result]()
    wrong: list[tuple[str, Result]] = []
    for first in range(0, len(programs), _AT_ONCE):
        names = list(programs)[first : first + _AT_ONCE]
        for name, result in zip(names, check([programs[name] for name in names], given.jobs), strict=True):
            results.append(result)
            if result.verdict.differences:
                wrong.append((name, result))
                _show(name, result)
    for name, result in wrong if given.shrink else ():
        small = shrink(result)
        _show(f"{name}, shrunk", small)
    print(_table(results))
    return int(bool(wrong))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/same_numbers", description="Random programs, compared with one process."
    )
    parser.add_argument("--program", help="this program, in the form in which failures are printed")
    parser.add_argument(
        "--strategy",
        choices=(*STRATEGIES, STOCK),
        nargs="*",
        default=STRATEGIES,
        help="only these; auto: Lightning alone, to judge the judge",
    )
    parser.add_argument("--jobs", type=int, default=2, help="groups of ranks at a time (default: 2)")
    parser.add_argument("--shrink", action="store_true", help="make each program that fails small")
    return parse(parser, runs=300)


def _programs(given: argparse.Namespace) -> dict[str, Program]:
    if given.program is not None:
        program = program_of(given.program)
        if (reason := impossible(program)) is not None:
            raise SystemExit(f"this program says nothing: {reason}")
        return {"program": program}
    return {f"--run {seed}": draw(seed, given.strategy) for seed in given.seeds}


def _show(name: str, result: Result) -> None:
    print(f"{name}: --program '{result.program}'")
    print("".join(f"    {line}\n" for line in result.verdict.differences[:6]), flush=True)


def _table(results: list[Result]) -> str:
    lines = [f"{count:5} {kind}" for kind, count in Counter(result.kind for result in results).most_common()]
    refused = Counter(result.verdict.refused for result in results if result.verdict.refused)
    lines += [f"      {count} refused: {sentence}" for sentence, count in refused.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
