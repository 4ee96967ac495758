"""What several hosts have found, as one table: hosts that found the same in one row, others marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_lockstep.doctor.findings import CheckResult, Finding

__all__ = ["merged"]

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
