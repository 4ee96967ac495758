"""Each imitated machine gets the findings that are recorded beside it."""

from __future__ import annotations

import pytest

from tests.doctor.machines import Case, cases, is_found

CASES = [pytest.param(case, check, id=f"{case.name}-{check}") for case in cases() for check in case.expected]


@pytest.mark.parametrize(("case", "check"), CASES)
def test_a_machine_gets_its_findings(case: Case, check: str) -> None:
    found = case.result(check).findings
    for expected in case.expected[check]:
        assert any(is_found(expected, finding) for finding in found), (expected, found)
    for finding in found:
        assert finding.subject and finding.evidence
        assert finding.fix or finding.status.value != "problem", "a problem has lines to paste"
