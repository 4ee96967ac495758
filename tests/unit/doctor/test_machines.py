"""Each imitated machine gets the findings that are recorded beside it."""

from __future__ import annotations

import json

import pytest
import yaml

from lightning_lockstep.doctor.registry import CheckOptions, Status
from tests.models.doctor.imitated_machine import ImitatedMachine, read_record, run_check
from tests.models.doctor.machines import FOLDER, Case, cases, is_found

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


@pytest.mark.parametrize(
    ("signal", "status", "told"),
    [
        ("10@120", "ok", "USR1 comes 120 s before it"),
        ("R:USR1@60", "ok", "USR1 comes 60 s before it"),
        ("'SIGterm@90'", "ok", "TERM comes 90 s before it"),
        ("RB:10@120", "warning", "--signal=USR1: it is sent to the batch script alone"),
        ("USR2@120", "warning", "--signal=USR2: StopTogether does not handle it"),
        ("USR1@30", "warning", "--signal=USR1 30 s before it: the last batch"),
        ("", "warning", "no --signal in the batch script"),
    ],
)
def test_a_signal_before_the_time_limit_is_read_as_sbatch_reads_it(signal: str, status: str, told: str) -> None:
    text = json.dumps(read_record(FOLDER / "slurm_uneven_tasks.yaml"))
    given = f" --signal={signal}" if signal else " --nodes=2"
    machine = ImitatedMachine(yaml.safe_load(text.replace(" --signal=USR1@120", given)))
    found = {row.subject: row for row in run_check("slurm", machine, CheckOptions()).findings}["time limit"]
    assert found.status.value == status and told in found.evidence
