"""Each imitated machine gets the findings that are recorded beside it."""

from __future__ import annotations

import pytest

from lightning_lockstep.doctor.registry import Status
from tests.common.doctor.machines import Case, cases, is_found

CASES = [pytest.param(case, check, id=f"{case.name}-{check}") for case in cases() for check in case.expected]


@pytest.mark.parametrize(("case", "check"), CASES)
def test_a_machine_gets_its_findings(case: Case, check: str) -> None:
    found = case.result(check).findings
    for expected in case.expected[check]:
        assert any(is_found(expected, finding) for finding in found), (expected, found)
    # What is not expected must be fine: a warning or a problem too many is as wrong as one too few.
    more = [finding for finding in found if not any(is_found(e, finding) for e in case.expected[check])]
    assert not [f for f in more if f.status in (Status.WARNING, Status.PROBLEM)], more
    for finding in found:
        assert finding.subject and finding.evidence
        assert finding.fix or finding.status.value != "problem", "a problem has lines to paste"
