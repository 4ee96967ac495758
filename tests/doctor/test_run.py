"""Run folders that the doctor reads: of real runs, and of files that somebody has damaged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lightning_lockstep.doctor.checks.run import run
from lightning_lockstep.doctor.findings import Finding, Status
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.doctor.this_machine import ThisMachine
from tests.distributed.mpi.launch import mpi_environ
from tests.helpers import run_script

SMALL = "data=source_text model=byte_gpt data.max_bytes=60000 trainer.accelerator=cpu test=false trainer.max_steps=4"
TWO = "trainer.devices=2 trainer.num_sanity_val_steps=0"


def findings(folder: Path) -> list[Finding]:
    return list(run(ThisMachine(), CheckOptions(folders=(str(folder),))))


@pytest.mark.parametrize(
    ("arguments", "status", "subject", "told", "fix"),
    [
        ("trainer.devices=1", Status.OK, "run", "it came to its end, 4 steps on 1 rank(s)", ""),
        (
            f"{TWO} callbacks=overflow model.learning_rate=1e30",
            Status.PROBLEM,
            "overflow",
            "made the first nan or inf (rank 0, batch",
            "fp32_modules",
        ),
        (
            f"{TWO} model._target_=tests.doctor.faulty_models.AsksForTooMuch",
            Status.PROBLEM,
            "out of memory",
            "rank 1 of 2",
            "lockstep-train callbacks=auto_batch_size ...",
        ),
        (
            f"{TWO} model._target_=tests.doctor.faulty_models.Stalls strategy.stall_timeout=2",
            Status.PROBLEM,
            "collective guard",
            "rank 1 never came to collective",
            "lockstep-doctor network",
        ),
    ],
    ids=["healthy", "overflow", "out_of_memory", "stalled"],
)
def test_real_runs(arguments: str, status: Status, subject: str, told: str, fix: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "lightning_lockstep.train", *SMALL.split(), *arguments.split()]
    outcome = run_script([*command, f"hydra.run.dir={folder}"], env=mpi_environ(), timeout=120)
    assert not outcome.timed_out and (outcome.returncode == 0) == (subject == "run"), outcome.output
    found = findings(folder)
    assert (found[0].status, found[0].subject) == (status, subject), found
    assert told in found[0].evidence and fix in "\n".join(found[0].fix), found
    assert all(finding.status is not Status.PROBLEM for finding in found[1:]), found


def test_a_search_for_a_batch_size_is_told(tmp_path: Path) -> None:
    content = {
        "size": 24,
        "accumulate": 2,
        "ranks": 4,
        "trials": [{}, {}, {}],
        "reason": "the limit is found",
    }
    (tmp_path / "batch_size.json").write_text(json.dumps(content))
    [size] = [finding for finding in findings(tmp_path) if finding.subject == "batch size"]
    assert "24 per rank x 2 accumulated x 4 rank(s), after 3 trials" in size.evidence


def test_a_loss_that_is_not_finite_is_found_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "metrics.csv").write_text("epoch,step,train_loss\n0,0,2.5\n0,1,nan\n0,2,nan\n")
    [metrics] = [finding for finding in findings(tmp_path) if finding.subject == "metrics"]
    assert "train_loss is nan at step 1" in metrics.evidence and "debug=overflow" in metrics.fix[0]


def test_a_run_that_left_nothing_can_go_on_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"")
    found = {finding.subject: finding for finding in findings(tmp_path)}
    assert "it may still be running" in found["run"].evidence  # written to just now
    assert found["checkpoints"].fix[0].startswith(f"lockstep-train ckpt_path={tmp_path}")


@pytest.mark.parametrize(
    "content", ["", "null", "[1]", '"text"', "{", '{"ranks": 3}', '{"text": null, "trials": 1}']
)
def test_damaged_files_are_read_without_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "overflow").mkdir()
    for name in (
        "failure.json",
        "summary.json",
        "guard-report.json",
        "batch_size.json",
        "overflow/batch-1.json",
    ):
        (tmp_path / name).write_text(content)
    assert findings(tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    [found] = findings(tmp_path / "none")
    assert found.status is Status.PROBLEM and "there is no such folder" in found.evidence
