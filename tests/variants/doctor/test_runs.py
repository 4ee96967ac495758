"""Run folders of the doctor in more ways: a healthy run, one out of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_lockstep.doctor.registry import Status
from tests.common.application.command_lines import TRAIN
from tests.helpers import run_script
from tests.programs.doctor.test_run import SMALL, TWO, findings


@pytest.mark.parametrize(
    ("arguments", "status", "subject", "told", "fix"),
    [
        ("trainer.devices=1", Status.OK, "run", "it finished: 4 steps on 1 rank;", ""),
        (
            f"{TWO} model._target_=tests.common.doctor.faulty_models.AsksForTooMuch",
            Status.PROBLEM,
            "failure",
            "rank 1 of 2",
            "",
        ),
    ],
    ids=["healthy", "out_of_memory"],
)
def test_real_runs(arguments: str, status: Status, subject: str, told: str, fix: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outcome = run_script([*TRAIN, *SMALL.split(), *arguments.split(), f"hydra.run.dir={folder}"], timeout=120)
    assert not outcome.timed_out and (outcome.returncode == 0) == (status is Status.OK), outcome.output
    found = findings(folder)
    assert (found[0].status, found[0].subject) == (status, subject), found
    assert told in found[0].evidence and fix in "\n".join(found[0].fix), found
    assert all(finding.status is not Status.PROBLEM for finding in found[1:]), found
