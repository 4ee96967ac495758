"""What a check has found: its status, the evidence, and the commands that fix it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CheckResult", "Finding", "Status", "not_applicable", "ok", "problem", "warning", "worst"]


class Status(str, enum.Enum):
    """How a finding stands, from the best to the worst."""

    NOT_APPLICABLE = "not applicable"
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"

    @property
    def severity(self) -> int:
        """Its place in the order, 0 for the best."""
        return list(Status).index(self)


@dataclass(frozen=True)
class Finding:
    """One thing that a check has looked at.

    Attributes:
        status: How it stands.
        subject: What was looked at, in a few words, such as ``toolkit on PATH``.
        evidence: What was seen, and what that means; for ``NOT_APPLICABLE`` why it does not matter here.
        fix: Lines to paste into a shell. A line that begins with ``#`` is a remark for the reader.
    """

    status: Status
    subject: str
    evidence: str
    fix: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it in types that JSON has."""
        return {
            "status": self.status.value,
            "subject": self.subject,
            "evidence": self.evidence,
            "fix": list(self.fix),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Return what :meth:`to_json` has written.

        Args:
            data: Its four entries.

        Raises:
            KeyError: An entry is missing.
            ValueError: There is no such status.
        """
        return cls(
            Status(data["status"]),
            str(data["subject"]),
            str(data["evidence"]),
            tuple(str(line) for line in data["fix"]),
        )


@dataclass(frozen=True)
class CheckResult:
    """All that one check has found.

    Attributes:
        check: Name of the check.
        findings: In the order in which they are shown; never empty.
        seconds: How long it took [s].
    """

    check: str
    findings: tuple[Finding, ...]
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """The worst status of its findings."""
        return worst(finding.status for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return it in types that JSON has."""
        return {
            "check": self.check,
            "status": self.status.value,
            "seconds": round(self.seconds, 3),
            "findings": [finding.to_json() for finding in self.findings],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckResult:
        """Return what :meth:`to_json` has written.

        Args:
            data: Its entries; that of the status is not needed.

        Raises:
            KeyError: An entry is missing.
            ValueError: An entry cannot be used.
        """
        findings = tuple(Finding.from_json(finding) for finding in data["findings"])
        return cls(str(data["check"]), findings, float(data.get("seconds", 0.0)))


def ok(subject: str, evidence: str) -> Finding:
    """Return a finding that needs nothing done."""
    return Finding(Status.OK, subject, evidence)


def warning(subject: str, evidence: str, *fix: str) -> Finding:
    """Return a finding with which a run may do badly."""
    return Finding(Status.WARNING, subject, evidence, fix)


def problem(subject: str, evidence: str, *fix: str) -> Finding:
    """Return a finding with which a run that needs this cannot succeed."""
    return Finding(Status.PROBLEM, subject, evidence, fix)


def not_applicable(subject: str, why: str) -> Finding:
    """Return a finding for what this machine does not have."""
    return Finding(Status.NOT_APPLICABLE, subject, why)


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst of several statuses, ``NOT_APPLICABLE`` of none."""
    return max(statuses, key=lambda status: status.severity, default=Status.NOT_APPLICABLE)
