"""The command ``lockstep-doctor``: checks of this machine before a run, with the lines to paste."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import lightning_lockstep
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep.doctor import table
from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.hosts import ChecksOfRanks, ChecksOnHosts, hosts_of
from lightning_lockstep.doctor.network_ranks import ClosedError
from lightning_lockstep.doctor.network_rendezvous import RendezvousError, joined_rank
from lightning_lockstep.doctor.registry import (
    BUILT_IN,
    NOT_BY_DEFAULT,
    CheckOptions,
    CheckResult,
    Status,
    check_names,
    load_check,
    worst,
)
from lightning_lockstep.errors import ConfigurationError

# -- Which checks a command line asks for, and which of their rows --

# Its arguments are folders.
_TAKES_FOLDERS = "run"


@dataclass(frozen=True)
class Selection:
    """What a command line asks for."""

    names: tuple[str, ...]  # in the order in which they are started
    folders: tuple[str, ...] = ()  # of runs
    least: Status = Status.NOT_APPLICABLE  # only rows of this status or a worse one are shown


def select(arguments: Sequence[str], only: str | None = None) -> Selection:
    """Return what arguments ask for; without names all checks that need no arguments."""
    known = check_names()
    statuses = {status.value: status for status in Status}
    wanted = [name for name in (only or "").split(",") if name]
    least = [statuses[name] for name in wanted if name in statuses]
    names, folders = [], []
    for argument in [*arguments, *(name for name in wanted if name not in statuses)]:
        if argument in known:
            names.append(argument)
        elif _TAKES_FOLDERS in names:
            folders.append(argument)
        else:
            _raise_unknown(argument, known)
    chosen = list(dict.fromkeys(names)) or [name for name in known if name not in NOT_BY_DEFAULT]
    return Selection(
        tuple(sorted(chosen, key=known.index)),
        tuple(folders),
        min(least, key=lambda status: status.severity, default=Status.NOT_APPLICABLE),
    )


def _raise_unknown(name: str, known: Sequence[str]) -> None:
    # Who names what a check looks at, such as `gpus` or `gloo`, is told which one that is.
    about = [check for check, summary in BUILT_IN.items() if name.lower() in summary.lower()]
    hint = did_you_mean(name, known) or (
        f" Did you mean {about[0]!r}: {BUILT_IN[about[0]]}?" if about else ""
    )
    raise ConfigurationError(f"check {name!r}: expected one of {', '.join(known)}.{hint}")


# -- The command ``lockstep-doctor``: checks of this machine before a run, with the lines to paste --

_PROGRAM = "lockstep-doctor"
# 2 is what typer ends with when the command line cannot be used.
_NO_PROBLEM, _PROBLEM, _USAGE, _ONLY_WARNINGS = 0, 1, 2, 3
# A terminal is at least so wide; a longer line would wrap and not be wiped.
_LONGEST = 78


class _Command(TyperCommand):
    """The command, with the list of its checks in its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        others = [(name, "of another package") for name in check_names() if name not in BUILT_IN]
        with formatter.section("Checks"):
            formatter.write_dl([*BUILT_IN.items(), *others])
        super().format_options(ctx, formatter)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=_Command, help=_HELP)(_doctor)
    app(list(sys.argv[1:] if argv is None else argv), prog_name=_PROGRAM)


_HELP = """Check this machine before a run, and print the commands that fix what was found.

Without arguments all checks run except `network` and `run`, which run only when named.

Exit code: 0 no problem, 1 a problem, 2 an invalid command line, 3 only warnings and --strict."""


def _completions(incomplete: str) -> list[str]:
    return [name for name in check_names() if name.startswith(incomplete)]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"lightning-lockstep {lightning_lockstep.__version__}")
        raise typer.Exit


def _doctor(  # noqa: PLR0913 - every option of the command line is one
    checks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECK", help="Checks to run; after `run`, run folders.", autocompletion=_completions
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Checks to run, separated by commas; or `warning` or `problem`: show only such rows.",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.1, help="Time limit per check in seconds (default: set by each check)."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 3 if there are warnings.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="CHECK", help="Print why a check matters, without running it.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks that `network` starts on this host (default: 2) or on each of --hosts (default: 1).",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Check these hosts, by ssh without a password; this one only if named."
        ),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Check the hosts of an mpirun hostfile.")
    ] = None,
    ssh_args: Annotated[
        str,
        typer.Option("--ssh-args", metavar="ARGS", help="Arguments passed to ssh, such as '-p 2222 -i key'."),
    ] = "",
    model_parameters: Annotated[
        float | None,
        typer.Option(
            "--model-parameters",
            "--model-params",
            min=1,
            help="Number of parameters of your model, such as 7e9; adds memory estimates.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs per node for these estimates (default: those of this host)."),
    ] = None,
    version: Annotated[  # what it prints, its callback has printed
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    try:
        if explain is not None:
            [name] = select([explain]).names
            found = load_check(name)
            typer.echo(f"{found.name}: {found.summary}\n\n{' '.join(found.why.split())}")
            return
        selection = select(checks or [], only)
        options = CheckOptions(
            timeout=timeout,
            nproc=nproc,
            hosts=() if hosts is None else _host_names(hosts),
            hostfile=str(hostfile) if hostfile is not None else None,
            ssh_args=_ssh_args(ssh_args),
            folders=selection.folders,
            model_parameters=model_parameters,
            gpus=gpus,
        )
        code = _run(selection, options, as_json=as_json, strict=strict)
    except ConfigurationError as error:
        typer.echo(f"{_PROGRAM}: {error}", err=True)
        code = _USAGE
    raise typer.Exit(code)


def _host_names(given: str) -> tuple[str, ...]:
    names = tuple(name for part in given.split(",") if (name := part.strip()))
    if not names:
        raise ConfigurationError(f"--hosts {given!r}: expected names of hosts, such as --hosts node1,node2.")
    return names


def _ssh_args(given: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(given))
    except ValueError as error:
        raise ConfigurationError(
            f"--ssh-args {given!r}: expected shell syntax, such as '-p 2222 -i key' ({error})."
        ) from error


def _run(selection: Selection, options: CheckOptions, *, as_json: bool, strict: bool) -> int:
    """Run the checks here, on the hosts that are named, or as one of several ranks; return the exit code."""
    checks: Checks | ChecksOfRanks | ChecksOnHosts
    me = joined_rank()  # of torchrun, mpirun or srun
    if me is not None and me.size > 1:
        checks = ChecksOfRanks(selection.names, options, me)
        if me.rank > 0:
            return _take_part(checks)
    elif hosts := hosts_of(options):
        checks = ChecksOnHosts(selection.names, options, hosts)
    else:
        checks = Checks(selection.names, options)
    results = _print_json(checks) if as_json else _print_table(checks, selection.least)
    status = worst(result.status for result in results)
    if status is Status.PROBLEM:
        return _PROBLEM
    return _ONLY_WARNINGS if strict and status is Status.WARNING else _NO_PROBLEM


def _take_part(checks: ChecksOfRanks) -> int:
    """Do what every rank does; rank 0 prints the table for all."""
    try:
        for _ in checks.results():
            pass
    except RendezvousError as error:
        typer.echo(f"{_PROGRAM}: {error}", err=True)
        return _PROBLEM
    except ClosedError:
        pass  # rank 0 has ended
    return _NO_PROBLEM


def _print_json(checks: Checks | ChecksOfRanks | ChecksOnHosts) -> list[CheckResult]:
    began = time.monotonic()
    # Results come as checks end; those of hosts that do not answer stay the first.
    place = {name: number for number, name in enumerate(checks.names)}
    results = sorted(checks.results(), key=lambda result: place.get(result.check, -1))
    report = {
        "host": socket.gethostname(),
        "status": worst(result.status for result in results).value,
        "seconds": round(time.monotonic() - began, 3),
        "checks": [result.to_json() for result in results],
    }
    typer.echo(json.dumps(report, indent=2))
    return results


def _print_table(checks: Checks | ChecksOfRanks | ChecksOnHosts, least: Status) -> list[CheckResult]:
    began = time.monotonic()
    results: list[CheckResult] = []
    to = table.console(of_a_rank=isinstance(checks, ChecksOfRanks))
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
