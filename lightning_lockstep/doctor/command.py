"""The command ``lockstep-doctor``: checks of this machine before a run, with the lines to paste."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lightning_lockstep
from lightning_lockstep._settings import did_you_mean
from lightning_lockstep.doctor.imitated_machine import check_record
from lightning_lockstep.doctor.registry import (
    BUILT_IN,
    NOT_BY_DEFAULT,
    CheckOptions,
    Status,
    check_names,
    load_check,
)
from lightning_lockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_lockstep.doctor.check_runner import Checks
    from lightning_lockstep.doctor.hosts import ChecksOfRanks, ChecksOnHosts
    from lightning_lockstep.doctor.network_rendezvous import JoinedRank


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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=_help())(_doctor)
    app(list(sys.argv[1:] if argv is None else argv), prog_name=_PROGRAM)


_WIDEST = 120  # characters of the help, on a terminal that is wider


def _help() -> str:
    width = max(map(len, BUILT_IN), default=0)
    room = min(shutil.get_terminal_size().columns, _WIDEST) - 4  # typer indents all by two, and so do we
    lines = [
        textwrap.fill(
            f"  {name:{width}}  {summary}",
            max(room, 40),
            subsequent_indent=" " * (width + 4),
            break_on_hyphens=False,
            break_long_words=False,
        )
        for name, summary in BUILT_IN.items()
    ]
    others = [name for name in check_names() if name not in BUILT_IN]
    if others:
        lines.append(f"  and those of other packages: {', '.join(others)}")
    return (
        "Check this machine before a run, and print the commands that fix what was found.\n\n"
        "Without arguments all of these checks run except `network` and `run`, which run only when named:\n\n\b\n"
        + "\n".join(lines)
        + "\n\nExit code: 0 no problem, 1 a problem, 2 an invalid command line, 3 only warnings and --strict."
    )


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
    sysroot: Annotated[
        Path | None,
        typer.Option(
            exists=True, help="Check a recorded machine instead: a record, or a folder with its files."
        ),
    ] = None,
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
            print_explanation(explain)
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
        if sysroot is not None:
            check_record(sysroot)
        code = _run(selection, options, sysroot=sysroot, as_json=as_json, strict=strict)
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


def _run(
    selection: Selection, options: CheckOptions, *, sysroot: Path | None, as_json: bool, strict: bool
) -> int:
    from lightning_lockstep.doctor.registry import CheckResult

    me = None if sysroot is not None else _rank_of_a_job()
    if me is not None and me.rank > 0:
        return _serve_rank_0(me, selection, options)
    checks = _checks(selection, options, sysroot, me)
    began = time.monotonic()
    results: list[CheckResult] = []
    if as_json:
        results = sorted(checks.results(), key=lambda result: _place(result.check, selection.names))
        typer.echo(json.dumps(_as_json(results, time.monotonic() - began), indent=2))
        return exit_code(results, strict=strict)
    from lightning_lockstep.doctor import table
    from lightning_lockstep.doctor.table import Progress

    to = table.console(of_a_rank=me is not None)
    table.print_heading(to)
    with Progress(to, checks) as progress:
        for result in checks.results(progress.tick):
            results.append(result)
            table.print_result(to, result, least=selection.least)
            progress.has_ended()
    table.print_fixes(to, results, least=selection.least)
    table.print_verdict(to, results, time.monotonic() - began)
    return exit_code(results, strict=strict)


def _rank_of_a_job() -> JoinedRank | None:
    """Return which rank this process is of several that torchrun, mpirun or srun has started."""
    from lightning_lockstep.doctor.network_rendezvous import joined_rank

    me = joined_rank()
    return me if me is not None and me.size > 1 else None


def _serve_rank_0(me: JoinedRank, selection: Selection, options: CheckOptions) -> int:
    """Do what rank 0 asks; rank 0 prints the table for all."""
    from lightning_lockstep.doctor.hosts import checks_of_host
    from lightning_lockstep.doctor.network_rendezvous import join

    why = join(me, checks_of_host(selection.names, options))
    if why:
        typer.echo(f"{_PROGRAM}: {why}", err=True)
    return _PROBLEM if why else _NO_PROBLEM


def _checks(
    selection: Selection, options: CheckOptions, sysroot: Path | None, me: JoinedRank | None
) -> Checks | ChecksOfRanks | ChecksOnHosts:
    from lightning_lockstep.doctor.hosts import hosts_of

    if me is not None:
        from lightning_lockstep.doctor.hosts import ChecksOfRanks

        return ChecksOfRanks(selection.names, options, me)
    if sysroot is None and (listed := hosts_of(options)):
        from lightning_lockstep.doctor.hosts import ChecksOnHosts

        return ChecksOnHosts(selection.names, options, listed)
    from lightning_lockstep.doctor.check_runner import Checks

    return Checks(selection.names, options, sysroot=sysroot)


def exit_code(results: Sequence[Any], *, strict: bool = False) -> int:
    """Return the exit code of the command: 0 without a problem, 1 with one, 3 with warnings under ``strict``."""
    from lightning_lockstep.doctor.registry import Status, worst

    status = worst(result.status for result in results)
    if status is Status.PROBLEM:
        return _PROBLEM
    return _ONLY_WARNINGS if strict and status is Status.WARNING else _NO_PROBLEM


def print_explanation(name: str) -> None:
    """Print what a check looks at and why that matters."""
    found = load_check(name)
    typer.echo(f"{found.name}: {found.summary}\n\n{' '.join(found.why.split())}")


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else -1  # that of hosts which do not answer comes first


def _as_json(results: Sequence[Any], seconds: float) -> dict[str, Any]:
    import socket

    from lightning_lockstep.doctor.registry import worst

    return {
        "host": socket.gethostname(),
        "status": worst(result.status for result in results).value,
        "seconds": round(seconds, 3),
        "checks": [result.to_json() for result in results],
    }
