"""What is printed: the rows, those of several hosts merged, and the line with the checks that still run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.status import Status as Spinner
from rich.table import Table
from rich.text import Text

from lightning_lockstep.doctor.registry import CheckResult, Finding, Status, worst

# -- What several hosts have found, as one table: hosts that found the same in one row, others marked --

_DIFFERS = "   <- differs"


def merged(by_host: Mapping[str, Sequence[CheckResult]]) -> list[CheckResult]:
    """Return one result for each check, with rows that name the hosts."""
    names = dict.fromkeys(result.check for results in by_host.values() for result in results)
    return [_merged_check(name, by_host) for name in names]


def _merged_check(name: str, by_host: Mapping[str, Sequence[CheckResult]]) -> CheckResult:
    found = {host: [r for r in results if r.check == name] for host, results in by_host.items()}
    seconds = max(result.seconds for results in found.values() for result in results)
    findings = {host: [f for r in results for f in r.findings] for host, results in found.items()}
    subjects = dict.fromkeys(finding.subject for listed in findings.values() for finding in listed)
    rows = [row for subject in subjects for row in _rows(subject, findings)]
    return CheckResult(name, tuple(rows), seconds)


def _rows(subject: str, findings: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """Yield a row for each thing that was found under one subject, that of most hosts first."""
    groups: dict[tuple[Finding, ...], list[str]] = {}
    for host, listed in findings.items():
        groups.setdefault(tuple(f for f in listed if f.subject == subject), []).append(host)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    for number, (same, hosts) in enumerate(ordered):
        place = ", ".join(hosts)
        if len(ordered) == 1 and len(hosts) > 1:
            place = f"all {len(hosts)} hosts"
        mark = _DIFFERS if number else ""
        if not same and number:
            yield replace(ordered[0][0][0], evidence=f"{place}: no such finding{mark}", fix=())
        for finding in same:
            fix = (f"# on {place}:", *finding.fix) if finding.fix else ()
            yield replace(finding, evidence=f"{place}: {finding.evidence}{mark}", fix=fix)


# -- The line below the rows with the checks that still run; only on a terminal --

# A terminal is at least so wide; a longer line would wrap and not be wiped.
_LONGEST = 78


class Running(Protocol):
    """Checks that run, here or elsewhere."""

    names: tuple[str, ...]

    def running(self) -> dict[str, float]:
        """Return those that run now, each with how long it has [s]."""


class Progress:
    """Shows the line while its body runs, and wipes it after."""

    def __init__(self, to: Console, checks: Running) -> None:
        self._checks, self._ended = checks, 0
        self._line = Spinner("", console=to) if to.is_terminal else None

    def __enter__(self) -> Progress:
        if self._line is not None:
            self.tick()
            self._line.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.stop()

    def tick(self) -> None:
        """Update the line."""
        if self._line is not None:
            running = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self._checks.running().items())
            text = f"{self._ended} of {len(self._checks.names)} checks ended; running: {running or '-'}"
            self._line.update(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ...")

    def has_ended(self) -> None:
        """Count one more check that has ended."""
        self._ended += 1
        self.tick()


# -- What the doctor prints: a block of rows for each check when it ends, then the commands to paste --

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
