"""The command ``lockstep-doctor``: checks of this machine before a run, with the lines to paste."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from textwrap import fill, indent
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import lightning_lockstep
from lightning_lockstep._settings import did_you_mean, settings_of
from lightning_lockstep._system import end_programs, shell_exit_code, usable_cores
from lightning_lockstep._text import counted, say
from lightning_lockstep.doctor import network
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import (
    CHECKS,
    NOT_BY_DEFAULT,
    CheckOptions,
    CheckResult,
    Finding,
    Status,
    function_of,
    hosts_of,
    problem,
    worst,
)
from lightning_lockstep.errors import ConfigurationError, LaunchError

# -- Which checks a command line asks for, and which of their rows --


def select(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return checks, in the order in which they are started, and folders of runs; without names all by default."""
    known, names, folders = list(CHECKS), [], []
    for argument in arguments:
        if argument in known:
            names.append(argument)
        elif "run" in names:
            folders.append(argument)
        else:
            hint = did_you_mean(argument, known)
            raise ConfigurationError(f"check {argument!r}: expected one of {', '.join(known)}.{hint}")
    chosen = {*names} or {*known} - {*NOT_BY_DEFAULT}
    return sorted(chosen, key=known.index), folders


# -- The checks of one call: in threads, some at a time, each with a deadline --

_ITSELF = "the check itself"


def results_of(names: Sequence[str], options: CheckOptions) -> Iterator[CheckResult]:
    """Run checks, started in this order, and yield each result when it is there."""
    # They import no torch, but for `network`, and start programs for whatever may crash.
    most = max(2, len(usable_cores()))
    alone = [name for name in names if CHECKS[name].runs_alone]
    waiting = [name for name in names if name not in alone]
    running: set[Future[CheckResult]] = set()
    while waiting or alone or running:
        while waiting and len(running) < most:
            running.add(network.started(partial(_result_of, waiting.pop(0), options)))
        if not running:
            running.add(network.started(partial(_result_of, alone.pop(0), options)))
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


def _result_of(name: str, options: CheckOptions) -> CheckResult:
    """Run a check until its deadline; what it has found before an error or the deadline is kept."""
    began, limit = time.monotonic(), options.timeout or CHECKS[name].timeout
    found: list[Finding] = []
    check = network.started(lambda: found.extend(function_of(name)(Machine(), options)))
    if not wait([check], limit).done:
        evidence = f"It did not end within {limit:g} s. It hangs, or needs more time."
        found.append(problem(_ITSELF, evidence, f"lockstep-doctor {name} --timeout {4 * limit:g}"))
    elif isinstance(error := check.exception(), ConfigurationError):
        found.append(problem(_ITSELF, str(error)))
    elif error is not None:
        raised = "".join(traceback.format_exception(error, limit=-2)).rstrip()
        found.append(problem(_ITSELF, f"It raised an error, a fault of the doctor.\n{raised}"))
    return CheckResult(name, tuple(found), time.monotonic() - began)


# -- What is printed: a block of rows for each check when it ends, then the commands to paste --

_STYLES = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.PROBLEM: "bold red",
    Status.NOT_APPLICABLE: "dim",
}
_CHECK, _STATUS, _SUBJECT = 12, 14, 26
# A log file has no width; lines of this many characters still fit a screen.
_WIDTH_OF_A_FILE = 120
_NARROWEST = 80


def console(*, of_a_rank: bool) -> Console:
    """Return a console that wraps at the width of the terminal, and at a fixed one in a file."""
    # mpirun gives its ranks its own terminal, and passes on what they print.
    made = Console(highlight=False, force_terminal=False if of_a_rank else None)
    made.width = max(_NARROWEST, made.width) if made.is_terminal else _WIDTH_OF_A_FILE
    return made


def print_result(
    to: Console, result: CheckResult, *, least: Status = Status.NOT_APPLICABLE, heading: bool = False
) -> bool:
    """Print the rows of a check, below the names of the columns if wanted; return whether there were any."""
    shown = [finding for finding in result.findings if finding.status.severity >= least.severity]
    if shown and heading:
        _print_row(to, *(Text(name, style="bold") for name in ("check", "status", "looked at", "found")))
    for number, finding in enumerate(shown):
        evidence, _, block = finding.evidence.partition("\n")
        check, status = "" if number else result.check, finding.status
        cells = Text(check), Text(status.value, style=_STYLES[status]), Text(finding.subject), Text(evidence)
        _print_row(to, *cells)
        if block:  # of a table or a traceback; the last column is too narrow for its lines
            to.print(Text(indent(block, "  ")), soft_wrap=True)
    return bool(shown)


def print_fixes(to: Console, results: Iterable[CheckResult], *, least: Status = Status.NOT_APPLICABLE) -> None:
    """Print the commands to paste, the worst findings first; their lines are never wrapped."""
    every = ((result.check, finding) for result in results for finding in result.findings)
    found = [one for one in every if one[1].fix and one[1].status.severity >= least.severity]
    found.sort(key=lambda entry: -entry[1].status.severity)
    groups: dict[tuple[str, ...], list[tuple[str, Finding]]] = {}
    for entry in found:
        groups.setdefault(entry[1].fix, []).append(entry)
    if groups:
        to.print("\nOptional:" if found[0][1].status is Status.OK else "\nTo fix, paste:", style="bold")
    for number, (fix, entries) in enumerate(groups.items(), 1):
        names = ", ".join(dict.fromkeys(f"{check}: {finding.subject}" for check, finding in entries))
        status = entries[0][1].status
        optional = " (optional)" if status is Status.OK else ""
        to.print(Text(f"\n# {number}. {names}{optional}", style=_STYLES[status]), soft_wrap=True)
        for line in fix:
            to.print(Text(line), soft_wrap=True)


def print_verdict(to: Console, results: Sequence[CheckResult], seconds: float) -> None:
    findings = [finding for result in results for finding in result.findings]
    number_of = Counter(finding.status for finding in findings)
    counts = [
        counted(number_of[status], status.value, plural="" if status.severity > 1 else status.value)
        for status in reversed(Status)  # `ok` and `not applicable` have no plural
        if number_of[status]
    ]
    style = _STYLES[worst(number_of)]
    checks = counted(len(results), "check")
    to.print(Text(f"\n{checks} in {seconds:.1f} s: {', '.join(counts)}", style=style))


def _print_row(to: Console, *cells: Text) -> None:
    row = Table.grid(padding=(0, 1), expand=True)
    for width in (_CHECK, _STATUS, _SUBJECT):
        row.add_column(width=width, overflow="fold")
    row.add_column(ratio=1, overflow="fold")
    row.add_row(*cells)
    to.print(row)


# -- The command line, and what it ends with --

_PROGRAM = "lockstep-doctor"
# 2 is what argparse ends with when the command line cannot be used.
_NO_PROBLEM, _PROBLEM, _USAGE, _ONLY_WARNINGS = 0, 1, 2, 3
_ABOUT = """Check this machine before a run, and print the commands that fix what it
found. Without arguments all checks run except `network` and `run`."""
_EXIT_CODES = """exit code: 0 no problem, 1 a problem, 2 an invalid command line, 3 only warnings
and --strict"""


def _parser() -> argparse.ArgumentParser:
    wide = max(map(len, CHECKS)) + 4
    listed = [
        fill(f"  {name:{wide}}{check.summary}", 78, subsequent_indent=" " * (wide + 2))
        for name, check in CHECKS.items()
    ]
    made = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=_ABOUT,
        epilog="\n".join(["checks:", *listed, "", _EXIT_CODES]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("checks", nargs="*", metavar="CHECK", help="checks to run; after `run`, run folders")
    add("--json", action="store_true", help="print one JSON object, and nothing else")
    add("--only", choices=("warning", "problem"), help="show only rows of this status or a worse one")
    add("--timeout", type=_number(0.1), help="time limit per check in seconds (default: set by each check)")
    add("--strict", action="store_true", help="exit with code 3 if there are warnings")
    add("--nproc", type=_number(1, int), help="ranks that `network` starts on this host (default: 2)")
    add("--hostfile", metavar="FILE", help="an mpirun hostfile; `mpi` tries ssh to its hosts")
    add("--ssh-args", type=shlex.split, metavar="ARGS", default=(), help="for ssh, such as '-p 2222 -i key'")
    told = "parameters of your model, such as 7e9; adds memory estimates"
    add("--model-parameters", "--model-params", type=_number(1), help=told)
    add("--gpus", type=_number(1, int), help="GPUs per node for these estimates (default: of this host)")
    add("--version", action="version", version=f"lightning-lockstep {lightning_lockstep.__version__}")
    return made


def _number(least: float, kind: type = float) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        if (value := kind(text)) < least:
            raise argparse.ArgumentTypeError(f"{text}: expected at least {least}")
        return value

    return number


def read(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str], CheckOptions]:
    """Return what a command line asks for: as it was given, the names of checks, and their options."""
    given = _parser().parse_intermixed_args(argv)
    names, folders = select(given.checks)
    read = {**vars(given), "ssh_args": tuple(given.ssh_args), "folders": tuple(folders)}
    options = settings_of(CheckOptions, read)
    if hosts_of(options) and "mpi" not in names:
        raise ConfigurationError(
            "--hostfile is for the check mpi. To test the network between hosts, start the doctor on them:"
            " mpirun --hostfile hosts lockstep-doctor network, or with srun or torchrun."
        )
    return given, names, options


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    try:
        given, names, options = read(argv)
    except ConfigurationError as error:
        say(f"{_PROGRAM}: {error}")
        raise SystemExit(_USAGE) from None
    least = Status(given.only) if given.only else Status.NOT_APPLICABLE
    if "network" in names:
        # Else torch prints stacks in C++ for each lost connection.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    else:  # ranks of `network` end by the signal itself, also while torch waits for others
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(shell_exit_code(-signal.SIGTERM)))
    try:
        raise SystemExit(run_checks(names, options, least, as_json=given.json, strict=given.strict))
    except KeyboardInterrupt:
        raise SystemExit(shell_exit_code(-signal.SIGINT)) from None
    finally:
        end_programs()  # of checks that have not ended


def run_checks(names: Sequence[str], options: CheckOptions, least: Status, *, as_json: bool, strict: bool) -> int:
    """Run the checks, `network` with the other ranks of the job if there are any; return the exit code."""
    began, ranks = time.monotonic(), None
    try:
        ranks = network.join() if "network" in names else None
        options = replace(options, ranks=ranks)
        if ranks is not None and 0 not in ranks.mine:
            for _ in function_of("network")(Machine(), options):
                pass  # rank 0 shows it
            return ranks.end()
    except (LaunchError, ImportError) as error:
        say(f"{_PROGRAM}: {error}")
        os._exit(_PROBLEM)  # MPI may hang, or wait for this rank
    results = _as_json(names, options, began) if as_json else _as_table(names, options, least, began)
    status = worst(result.status for result in results)
    code = _ONLY_WARNINGS if strict and status is Status.WARNING else _NO_PROBLEM
    code = _PROBLEM if status is Status.PROBLEM else code
    if ranks is not None:
        sys.stdout.flush()  # mpirun ends a job of which one rank ends without MPI, or with another code than 0
        ranks.end(code)
    return code


def _as_json(names: Sequence[str], options: CheckOptions, began: float) -> list[CheckResult]:
    results = sorted(results_of(names, options), key=lambda result: names.index(result.check))
    report = {
        "host": socket.gethostname(),
        "status": worst(result.status for result in results).value,
        "seconds": round(time.monotonic() - began, 3),
        "checks": [result.to_json() for result in results],
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return results


def _as_table(names: Sequence[str], options: CheckOptions, least: Status, began: float) -> list[CheckResult]:
    results: list[CheckResult] = []
    to = console(of_a_rank=options.ranks is not None)
    has_rows, remaining = False, list(names)
    with to.status(f"waiting for {', '.join(remaining)}") as line:  # on a terminal, below the rows
        for result in results_of(names, options):
            results.append(result)
            has_rows |= print_result(to, result, least=least, heading=not has_rows)
            remaining.remove(result.check)
            line.update(f"waiting for {', '.join(remaining)}")
    print_fixes(to, results, least=least)
    print_verdict(to, results, time.monotonic() - began)
    return results
