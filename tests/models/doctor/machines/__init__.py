"""Imitated machines, a YAML file each, with what the doctor is expected to find on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_lockstep.doctor.registry import CheckOptions, CheckResult, Finding
from tests.models.doctor.imitated_machine import ImitatedMachine, read_machine, read_record, run_check

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """One imitated machine and what is to be found there."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def record(self) -> dict[str, Any]:
        return read_record(self.path)

    @property
    def expected(self) -> dict[str, list[dict[str, Any]]]:
        """Check -> the findings that must be among its own, each by status, subject and parts of its text."""
        expected: dict[str, list[dict[str, Any]]] = self.record["expected"]
        return expected

    @property
    def machine(self) -> ImitatedMachine:
        return read_machine(self.path)

    def options(self) -> CheckOptions:
        return CheckOptions(**self.record.get("options", {}))

    def result(self, check: str) -> CheckResult:
        return run_check(check, self.machine, self.options())


def cases() -> list[Case]:
    return [Case(path) for path in sorted(FOLDER.glob("*.yaml"))]


def is_found(expected: Mapping[str, Any], finding: Finding) -> bool:
    """Whether a finding is the expected one; texts are parts of the real ones, lines to paste are whole lines."""
    return (
        finding.status.value == expected["status"]
        and finding.subject == expected["subject"]
        and all(part in finding.evidence for part in _list(expected.get("evidence")))
        and all(line in finding.fix for line in _list(expected.get("fix")))
    )


def _list(value: object) -> list[str]:
    return [str(part) for part in value] if isinstance(value, list) else [str(value)] if value else []
