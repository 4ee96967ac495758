"""The command line; see the docstring of the package."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.random_runs import parse
from benchmarks.soak.outcome import differences
from benchmarks.soak.plan import FAULTS, LAUNCHES, Plan, draw
from benchmarks.soak.rules import expect, known
from benchmarks.soak.run import LIMIT, launches_here, perform
from benchmarks.soak.table import Result, stock_table, table
from tests.harness.slurm import Slurm


def main() -> int:
    """Do the runs that the command line asks for; the exit code is 1 if one is not as expected."""
    given = _arguments()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; runs would inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    plans = list(_plans(given))
    with contextlib.ExitStack() as stack:
        has_srun = any(plan.launch == "srun" for plan in plans)
        slurm = stack.enter_context(Slurm()) if has_srun else None
        pool = stack.enter_context(ThreadPoolExecutor(given.jobs))
        results = list(pool.map(lambda plan: _run(plan, given, slurm), plans))
    print(f"\n{stock_table(results) if given.stock else table(results)}")
    bad = [result for result in results if result.verdict == "not as expected"]
    return 0 if given.stock or not bad else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Random runs, each with one fault.")
    parser.add_argument("--fault", choices=FAULTS, help="only the runs with this fault")
    parser.add_argument("--launch", choices=LAUNCHES, help="only the runs whose ranks are started this way")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--keep", type=Path, default=Path("outputs/soak"), help="folder for output of failures")
    parser.add_argument("--stock", action="store_true", help="Lightning's own ddp: print what happens")
    return parse(parser, runs=200)


def _plans(given: argparse.Namespace) -> Iterator[Plan]:
    why_not = launches_here()
    here = tuple(launch for launch in LAUNCHES if why_not[launch] is None)
    for launch, reason in why_not.items():
        if reason is not None:
            print(f"no runs with {launch}: {reason}", flush=True)
    for seed in given.seeds:
        plan = draw(seed, stock=given.stock, launches=here)
        applies = not (given.stock and plan.fault == "stranger")  # it has no side channel
        if applies and given.fault in (None, plan.fault) and given.launch in (None, plan.launch):
            yield plan


def _run(plan: Plan, given: argparse.Namespace, slurm: Slurm | None) -> Result:
    seen = perform(plan, 30.0 if plan.stock else LIMIT, slurm)
    result = Result(plan, seen, [] if plan.stock else differences(expect(plan), seen))
    parts = {"stdout": seen.script.stdout, "stderr": seen.script.stderr}
    parts |= {f"rank {rank}: what ended its fit": error for rank, error in seen.errors.items()}
    output = "\n".join(f"--- {title}\n{text}" for title, text in parts.items())
    lines = [f"{plan.seed}: {plan}: {seen.seconds:.1f} s: {result.verdict if not plan.stock else 'done'}"]
    for difference in result.differences:
        reason = known(plan, difference)
        lines.append(f"    {difference}{f' (known: {reason})' if reason else ''}")
    if result.differences:
        given.keep.mkdir(parents=True, exist_ok=True)
        kept = given.keep / f"{plan.seed}.txt"
        kept.write_text("\n".join([*lines, output]))
        lines.append(f"    again: python -m benchmarks.soak --run {plan.seed}    output: {kept}")
    print("\n".join([*lines, output] if given.run is not None else lines), flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
