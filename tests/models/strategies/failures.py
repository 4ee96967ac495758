"""Runs of ``fit_script.py``: how they end, and what they keep."""

from __future__ import annotations

from pathlib import Path

from lightning_lockstep.distributed import FailureRecord
from lightning_lockstep.distributed.failure.record import place_in_words
from lightning_lockstep.doctor.checks.run import check as doctor_run
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import CheckOptions, Status
from tests.harness import MODELS, ScriptOutcome, run_script

SCRIPT = MODELS / "strategies" / "fit_script.py"
LIMIT = 120.0  # only so that a hang ends the test
SAVED = "Saved to ./failure.json; to read it: lockstep-doctor run ."


def run(*args: str, folder: Path | None = None) -> ScriptOutcome:
    outcome = run_script([str(SCRIPT), *args], timeout=LIMIT, cwd=folder)
    assert not outcome.timed_out, outcome.output
    assert outcome.leftovers == (), f"no rank is left behind: {outcome.output}"
    return outcome


def last_lines(text: str, number: int = 12) -> str:
    return "\n".join(text.rstrip().splitlines()[-number:])


def check_kept(folder: Path, rank: int, summary: str) -> None:
    """Check what a failed run has left in its folder, and that the doctor reads it."""
    place = "epoch 0, step 5, batch 5, stage train"
    record = FailureRecord.from_json((folder / "failure.json").read_text())
    assert (record.rank, record.world_size) == (rank, 2) and summary in record.summary
    assert place_in_words(record.where).startswith(place), record
    found = list(doctor_run(Machine(), CheckOptions(folders=(str(folder),))))
    [problem] = [one for one in found if one.status is Status.PROBLEM]
    assert f"rank {rank} of 2" in problem.evidence and summary in problem.evidence and place in problem.evidence
