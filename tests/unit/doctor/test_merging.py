"""What several hosts have found, in one table."""

from __future__ import annotations

from lightning_lockstep.doctor.registry import CheckResult, Finding, Status, ok, problem
from lightning_lockstep.doctor.table import merged


def result(*findings: Finding) -> list[CheckResult]:
    return [CheckResult("cuda", findings, 1.0)]


def test_hosts_that_agree_share_a_row() -> None:
    [found] = merged({"a": result(ok("driver", "550")), "b": result(ok("driver", "550"))})
    assert found.findings == (ok("driver", "all 2 hosts: 550"),)


def test_a_host_that_differs_is_marked_and_its_fix_names_it() -> None:
    by_host = {
        "a": result(ok("driver", "550")),
        "b": result(problem("driver", "too old", "apt install driver")),
        "c": result(ok("driver", "550")),
    }
    [found] = merged(by_host)
    assert [finding.evidence for finding in found.findings] == ["a, c: 550", "b: too old   <- differs"]
    assert found.findings[1].fix == ("# on b:", "apt install driver")
    assert found.status is Status.PROBLEM


def test_a_host_that_lacks_a_row_is_named() -> None:
    [found] = merged({"a": result(ok("toolkit", "12.4")), "b": result(), "c": result(ok("toolkit", "12.4"))})
    assert [finding.evidence for finding in found.findings] == [
        "a, c: 12.4",
        "b: no such finding   <- differs",
    ]
