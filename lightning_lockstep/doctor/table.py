"""What is printed: a block of rows for each check when it ends, then the commands to paste."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from textwrap import indent

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_lockstep._text import counted
from lightning_lockstep.doctor.registry import CheckResult, Finding, Status, worst

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
        _print_row(
            to,
            Text("" if number else result.check),
            Text(finding.status.value, style=_STYLES[finding.status]),
            Text(finding.subject),
            Text(evidence),
        )
        if block:  # of a table or a traceback; the last column is too narrow for its lines
            to.print(Text(indent(block, "  ")), soft_wrap=True)
    return bool(shown)


def print_fixes(
    to: Console, results: Iterable[CheckResult], *, least: Status = Status.NOT_APPLICABLE
) -> None:
    """Print the commands to paste, the worst findings first; their lines are never wrapped."""
    found = [(result.check, finding) for result in results for finding in result.findings if finding.fix]
    found = [entry for entry in found if entry[1].status.severity >= least.severity]
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
    """Print the last line: how many findings of each status."""
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
