"""What the doctor prints: a block of rows for each check when it ends, then the commands to paste."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_lockstep.doctor.findings import CheckResult, Finding, Status, worst

__all__ = ["console", "print_fixes", "print_heading", "print_result", "print_verdict"]

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


def console(*, is_error: bool = False, of_a_rank: bool = False) -> Console:
    """Return a console that wraps at the width of the terminal, and at a fixed one in a file."""
    # mpirun gives its ranks a terminal of its own, and passes on what they print.
    made = Console(stderr=is_error, highlight=False, force_terminal=False if of_a_rank else None)
    made.width = max(_NARROWEST, made.width) if made.is_terminal else _WIDTH_OF_A_FILE
    return made


def print_heading(to: Console) -> None:
    """Print the names of the columns."""
    table = _grid()
    table.add_row(*(Text(name, style="bold") for name in ("check", "status", "looked at", "found")))
    to.print(table)


def print_result(to: Console, result: CheckResult, *, least: Status = Status.NOT_APPLICABLE) -> None:
    """Print the rows of a check."""
    shown = [finding for finding in result.findings if finding.status.severity >= least.severity]
    for number, finding in enumerate(shown):
        evidence, _, block = finding.evidence.partition("\n")
        is_table = bool(block) and all(line.startswith("  ") for line in block.splitlines())
        row = _grid()
        row.add_row(
            Text("" if number else result.check),
            Text(finding.status.value, style=_STYLES[finding.status]),
            Text(finding.subject),
            Text(evidence if is_table else finding.evidence),
        )
        to.print(row)
        if is_table:  # the last column is too narrow for the columns of another table
            to.print(Text(block), soft_wrap=True)


def print_fixes(
    to: Console, results: Iterable[CheckResult], *, least: Status = Status.NOT_APPLICABLE
) -> None:
    """Print the commands to paste, the worst findings first; their lines are never wrapped."""
    found = [(result.check, finding) for result in results for finding in result.findings if finding.fix]
    found = [entry for entry in found if entry[1].status.severity >= least.severity]
    found.sort(key=lambda entry: -entry[1].status.severity)
    for number, (fix, entries) in enumerate(_grouped(found), 1):
        if number == 1:
            to.print("\nTo fix, paste:", style="bold")
        names = ", ".join(dict.fromkeys(f"{check}: {finding.subject}" for check, finding in entries))
        to.print(Text(f"\n# {number}. {names}", style=_STYLES[entries[0][1].status]), soft_wrap=True)
        for line in fix:
            to.print(Text(line), soft_wrap=True)


def print_verdict(to: Console, results: Sequence[CheckResult], seconds: float) -> None:
    """Print the last line: how many findings of each status."""
    findings = [finding for result in results for finding in result.findings]
    counts = [
        f"{number} {_plural(status.value, number)}"
        for status in (Status.PROBLEM, Status.WARNING, Status.OK, Status.NOT_APPLICABLE)
        if (number := sum(finding.status is status for finding in findings))
    ]
    style = _STYLES[worst(finding.status for finding in findings)]
    checks = f"{len(results)} check{'' if len(results) == 1 else 's'}"
    to.print(Text(f"\n{checks} in {seconds:.1f} s: {', '.join(counts)}", style=style))


def _grid() -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    for width in (_CHECK, _STATUS, _SUBJECT):
        table.add_column(width=width, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    return table


def _grouped(
    found: Iterable[tuple[str, Finding]],
) -> list[tuple[tuple[str, ...], list[tuple[str, Finding]]]]:
    """Return each fix with the findings that it is for; one whose lines all stand in another is part of that."""
    entries = list(found)
    fixes = list(dict.fromkeys(finding.fix for _, finding in entries))
    whole = {fix: max((other for other in fixes if set(fix) <= set(other)), key=len) for fix in fixes}
    groups: dict[tuple[str, ...], list[tuple[str, Finding]]] = {}
    for check, finding in entries:
        groups.setdefault(whole[finding.fix], []).append((check, finding))
    return list(groups.items())


def _plural(name: str, number: int) -> str:
    return f"{name}s" if number != 1 and name in ("problem", "warning") else name
