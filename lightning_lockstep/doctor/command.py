"""The command ``lockstep-doctor``: checks of this machine before a run, with the lines to paste."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning_lockstep
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep._text import say
from lightning_lockstep.doctor import network, table
from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.network_findings import examine
from lightning_lockstep.doctor.registry import (
    CHECKS,
    NOT_BY_DEFAULT,
    CheckOptions,
    CheckResult,
    Finding,
    Status,
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
            _raise_unknown(argument)
    chosen = {*names} or {*known} - {*NOT_BY_DEFAULT}
    return sorted(chosen, key=known.index), folders


def _raise_unknown(name: str) -> None:
    # Who names what a check looks at, such as `gpus` or `gloo`, is told which one that is.
    about = [check for check, known in CHECKS.items() if name.lower() in known.summary.lower()]
    hint = did_you_mean(name, list(CHECKS)) or (
        f" Did you mean {about[0]!r}: {CHECKS[about[0]].summary}?" if about else ""
    )
    raise ConfigurationError(f"check {name!r}: expected one of {', '.join(CHECKS)}.{hint}")


# -- The command ``lockstep-doctor``: checks of this machine before a run, with the lines to paste --

_PROGRAM = "lockstep-doctor"
# 2 is what argparse ends with when the command line cannot be used.
_NO_PROBLEM, _PROBLEM, _USAGE, _ONLY_WARNINGS = 0, 1, 2, 3
# A terminal is at least so wide; a longer line would wrap and not be wiped.
_LONGEST = 78
_ABOUT = """Check this machine before a run, and print the commands that fix what it
found. Without arguments all checks run except `network` and `run`."""
_EXIT_CODES = """exit code: 0 no problem, 1 a problem, 2 an invalid command line, 3 only warnings
and --strict"""


def _parser() -> argparse.ArgumentParser:
    wide = max(map(len, CHECKS)) + 4
    told = [
        textwrap.fill(f"  {name:{wide}}{check.summary}", 78, subsequent_indent=" " * (wide + 2))
        for name, check in CHECKS.items()
    ]
    made = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=_ABOUT,
        epilog="\n".join(["checks:", *told, "", _EXIT_CODES]),
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
    add("--hosts", metavar="A,B", default="", help="hosts that `mpi` checks, by ssh without a password")
    add("--hostfile", metavar="FILE", help="an mpirun hostfile with such hosts")
    add(
        "--ssh-args",
        type=shlex.split,
        metavar="ARGS",
        default=(),
        help="arguments passed to ssh, such as '-p 2222 -i key'",
    )
    add(
        "--model-parameters",
        "--model-params",
        type=_number(1),
        help="parameters of your model, such as 7e9; adds memory estimates",
    )
    add(
        "--gpus", type=_number(1, int), help="GPUs per node for these estimates (default: those of this host)"
    )
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
    options = CheckOptions(
        timeout=given.timeout,
        nproc=given.nproc,
        hosts=tuple(filter(None, map(str.strip, given.hosts.split(",")))),
        hostfile=given.hostfile,
        ssh_args=tuple(given.ssh_args),
        folders=tuple(folders),
        model_parameters=given.model_parameters,
        gpus=given.gpus,
    )
    if hosts_of(options) and "mpi" not in names:
        raise ConfigurationError(
            "--hosts and --hostfile are for the check mpi. To test the network between hosts, start the doctor on them:"
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
    raise SystemExit(run_checks(names, options, least, as_json=given.json, strict=given.strict))


def run_checks(
    names: Sequence[str], options: CheckOptions, least: Status, *, as_json: bool, strict: bool
) -> int:
    """Run the checks, `network` with the other ranks of the job if there are any; return the exit code."""
    checks, ranks, began = Checks(names, options), None, time.monotonic()
    try:
        ranks = network.join() if "network" in names else None
        if ranks is not None and 0 not in ranks.mine:
            return _left(ranks, ranks.serve())
    except (LaunchError, ImportError) as error:
        say(f"{_PROGRAM}: {error}")
        os._exit(_PROBLEM)  # MPI may hang, or wait for this rank
    if ranks is not None:
        checks = _ChecksOfRanks(names, options, ranks)
    results = _print_json(checks, began) if as_json else _print_table(checks, least, began)
    status = worst(result.status for result in results)
    code = _ONLY_WARNINGS if strict and status is Status.WARNING else _NO_PROBLEM
    code = _PROBLEM if status is Status.PROBLEM else code
    if ranks is None:
        return code
    sys.stdout.flush()  # mpirun ends a job of which one rank ends without MPI, or with another code than 0
    ranks.end(code)
    return _left(ranks, code)


def _left(ranks: network.Ranks, code: int) -> int:
    """Return an exit code, or end this process with it if MPI would never let it end."""
    if ranks.hangs:
        os._exit(code)
    return code


class _ChecksOfRanks(Checks):
    """The checks of rank 0 of a job: `network` in this process, the others as everywhere."""

    def __init__(self, names: Sequence[str], options: CheckOptions, ranks: network.Ranks) -> None:
        super().__init__([name for name in names if name != "network"], options)
        self._ranks = ranks

    def results(self, tick: Callable[[], None] = lambda: None) -> Iterator[CheckResult]:
        yield from super().results(tick)
        self._ranks.tick = tick
        began = time.monotonic()
        found: list[Finding] = []
        try:
            found += examine(self._ranks, network.BACKENDS)
        except (LaunchError, RuntimeError) as error:  # a message that is not signed, a lost store
            found.append(problem("ranks", str(error), "export MASTER_PORT=ANOTHER_PORT"))
        yield CheckResult("network", tuple(found), time.monotonic() - began)


def _print_json(checks: Checks, began: float) -> list[CheckResult]:
    results = sorted(checks.results(), key=lambda result: list(CHECKS).index(result.check))
    report = {
        "host": socket.gethostname(),
        "status": worst(result.status for result in results).value,
        "seconds": round(time.monotonic() - began, 3),
        "checks": [result.to_json() for result in results],
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return results


def _print_table(checks: Checks, least: Status, began: float) -> list[CheckResult]:
    results: list[CheckResult] = []
    to = table.console(of_a_rank=isinstance(checks, _ChecksOfRanks))
    has_rows = False
    with to.status("") as line:  # on a terminal, below the rows

        def show_what_runs() -> None:
            running = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in checks.running().items())
            line.update(
                f"{len(results)} of {len(checks.names)} checks ended; running: {running or '-'}"[:_LONGEST]
            )

        for result in checks.results(show_what_runs):
            results.append(result)
            has_rows |= table.print_result(to, result, least=least, heading=not has_rows)
    table.print_fixes(to, results, least=least)
    table.print_verdict(to, results, time.monotonic() - began)
    return results
