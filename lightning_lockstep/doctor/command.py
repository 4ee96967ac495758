"""The command ``lockstep-doctor``: checks of this machine before a run, with the lines to paste."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Selection:
    """What a command line asks for."""

    names: tuple[str, ...]  # in the order in which they are started
    folders: tuple[str, ...] = ()  # of runs
    least: Status = Status.NOT_APPLICABLE  # only rows of this status or a worse one are shown


def select(arguments: Sequence[str], only: str | None = None) -> Selection:
    """Return what arguments ask for; without names all checks that need no arguments."""
    known = list(CHECKS)
    statuses = {status.value: status for status in Status}
    wanted = [name for name in (only or "").split(",") if name]
    least = [statuses[name] for name in wanted if name in statuses]
    names, folders = [], []
    for argument in [*arguments, *(name for name in wanted if name not in statuses)]:
        if argument in known:
            names.append(argument)
        elif "run" in names:
            folders.append(argument)
        else:
            _raise_unknown(argument)
    chosen = list(dict.fromkeys(names)) or [name for name in known if name not in NOT_BY_DEFAULT]
    return Selection(
        tuple(sorted(chosen, key=known.index)),
        tuple(folders),
        min(least, key=lambda status: status.severity, default=Status.NOT_APPLICABLE),
    )


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
    add(
        "--only",
        metavar="NAMES",
        help="checks to run, separated by commas; or `warning` or `problem`: only such rows",
    )
    add("--timeout", type=_number(0.1), help="time limit per check in seconds (default: set by each check)")
    add("--strict", action="store_true", help="exit with code 3 if there are warnings")
    add("--explain", metavar="CHECK", help="print why a check matters, without running it")
    add("--nproc", type=_number(1, int), help="ranks that `network` starts on this host (default: 2)")
    add("--hosts", metavar="A,B", default="", help="hosts that `mpi` checks, by ssh without a password")
    add("--hostfile", metavar="FILE", help="an mpirun hostfile with such hosts")
    add("--ssh-args", metavar="ARGS", default="", help="arguments passed to ssh, such as '-p 2222 -i key'")
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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    given = _parser().parse_intermixed_args(argv)
    try:
        if given.explain is not None:
            [name] = select([given.explain]).names
            why = importlib.import_module(CHECKS[name].module).WHY
            sys.stdout.write(f"{name}: {CHECKS[name].summary}\n\n{' '.join(why.split())}\n")
            raise SystemExit(_NO_PROBLEM)
        selection = select(given.checks, given.only)
        options = CheckOptions(
            timeout=given.timeout,
            nproc=given.nproc,
            hosts=tuple(filter(None, map(str.strip, given.hosts.split(",")))),
            hostfile=given.hostfile,
            ssh_args=_ssh_args(given.ssh_args),
            folders=selection.folders,
            model_parameters=given.model_parameters,
            gpus=given.gpus,
        )
        code = _run(selection, options, as_json=given.json, strict=given.strict)
    except ConfigurationError as error:
        say(f"{_PROGRAM}: {error}")
        code = _USAGE
    raise SystemExit(code)


def _ssh_args(given: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(given))
    except ValueError as error:
        raise ConfigurationError(
            f"--ssh-args {given!r}: expected shell syntax, such as '-p 2222 -i key' ({error})."
        ) from error


def _run(selection: Selection, options: CheckOptions, *, as_json: bool, strict: bool) -> int:
    """Run the checks, `network` with the other ranks of the job if there are any; return the exit code."""
    if hosts_of(options) and "mpi" not in selection.names:
        raise ConfigurationError(
            "--hosts and --hostfile are for the check mpi. To test the network between hosts, start the doctor on them:"
            " mpirun --hostfile hosts lockstep-doctor network, or with srun or torchrun."
        )
    checks, ranks = Checks(selection.names, options), None
    try:
        ranks = network.join() if "network" in selection.names else None
        if ranks is not None and 0 not in ranks.mine:
            ranks.serve()
            return _left(ranks, _NO_PROBLEM)
    except (LaunchError, ImportError) as error:
        say(f"{_PROGRAM}: {error}")
        os._exit(_PROBLEM)  # MPI may hang, or wait for this rank
    if ranks is not None:
        checks = _ChecksOfRanks(selection.names, options, ranks)
    results = _print_json(checks) if as_json else _print_table(checks, selection.least)
    status = worst(result.status for result in results)
    code = _ONLY_WARNINGS if strict and status is Status.WARNING else _NO_PROBLEM
    code = _PROBLEM if status is Status.PROBLEM else code
    if ranks is None:
        return code
    ranks.end()  # not before all is printed: mpirun ends a job of which one rank ends without MPI
    return _left(ranks, code)


def _left(ranks: network.Ranks, code: int) -> int:
    """Return an exit code, or end this process with it if MPI would never let it end."""
    if ranks.hangs:
        sys.stdout.flush()
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


def _print_json(checks: Checks) -> list[CheckResult]:
    began = time.monotonic()
    results = sorted(checks.results(), key=lambda result: list(CHECKS).index(result.check))
    report = {
        "host": socket.gethostname(),
        "status": worst(result.status for result in results).value,
        "seconds": round(time.monotonic() - began, 3),
        "checks": [result.to_json() for result in results],
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return results


def _print_table(checks: Checks, least: Status) -> list[CheckResult]:
    began = time.monotonic()
    results: list[CheckResult] = []
    to = table.console(of_a_rank=isinstance(checks, _ChecksOfRanks))
    table.print_heading(to)
    with to.status("") as line:  # on a terminal, below the rows

        def show_what_runs() -> None:
            running = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in checks.running().items())
            line.update(
                f"{len(results)} of {len(checks.names)} checks ended; running: {running or '-'}"[:_LONGEST]
            )

        for result in checks.results(show_what_runs):
            results.append(result)
            table.print_result(to, result, least=least)
    table.print_fixes(to, results, least=least)
    table.print_verdict(to, results, time.monotonic() - began)
    return results
