"""Runs of ``guard_script.py``, and what is said in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.harness import MODELS, ScriptOutcome, run_script

SCRIPT = MODELS / "strategies" / "guard_script.py"
LIMIT = 120.0  # only so that a hang ends the test


def run(tmp_path: Path, case: str, start: str = "popen", *options: str) -> ScriptOutcome:
    return ended(run_script([str(SCRIPT), case, str(tmp_path), start, *options], timeout=LIMIT))


def ended(outcome: ScriptOutcome) -> ScriptOutcome:
    assert not outcome.timed_out, outcome.output
    assert outcome.leftovers == (), f"no rank is left behind: {outcome.output}"
    return outcome


def rows(text: str) -> list[str]:
    """Return the rows of the last table of a report, without padding."""
    return [re.sub(r"\s+", " ", row).strip() for row in re.findall(r"^  +[01]  .*$", text, re.MULTILINE)][-2:]


def check_kept(outcome: ScriptOutcome, folder: Path, summary: str, *, last: bool = True) -> None:
    """Check that the error is in a file, and that the last line, or one above mpirun's remarks, names that."""
    record = json.loads((folder / "failure.json").read_text())
    assert record["summary"].startswith(summary), record
    reads = f"to read it: lockstep-doctor run {folder}"
    line = f"Saved to {folder}/failure.json; {reads}"
    lines = outcome.stderr.rstrip().splitlines()
    assert lines[-1] == line if last else f"[1,0]<stderr>: {line}" in lines, outcome.stderr


def check_different(tmp_path: Path, case: str, start: str, expected: tuple[str, str]) -> None:
    """Check that ranks which call different things raise the same, with a row for each."""
    outcome = run(tmp_path, case, start)
    assert outcome.returncode == 1, outcome.output
    for found, wanted in zip(rows(outcome.stderr), expected, strict=True):
        assert re.match(wanted, found), outcome.stderr
    divided = "FSDP has divided the model, so each call of a layer is an all_gather" in outcome.stderr
    assert divided == (start == "fsdp"), outcome.stderr
    check_kept(outcome, tmp_path, "CollectiveMismatchError: ranks disagree on")


def check_stall(outcome: ScriptOutcome, place: str) -> None:
    assert outcome.returncode == 1, outcome.output
    assert "CollectiveStallError: rank 1 never came to collective #" in outcome.stderr
    assert all(f"rank {rank} raises CollectiveStallError" in outcome.stdout for rank in (0, 1))
    assert re.search(rf"1 +- +{place}, after #\d+ all_reduce.*<- never came", outcome.stderr), outcome.stderr
    assert re.search(
        r"^(\[\S* ?0\]\S* )?Ranks? 0.* at epoch 0, step \d, batch \d, stage train",
        outcome.stderr,
        re.MULTILINE,
    )
    assert 'guard="verify"' not in outcome.stderr, "it finds no rank that never comes"
    assert "Stack of rank 1 (innermost frame last)" in outcome.stderr
    # The user's files by their whole paths; what libraries do between is one line.
    assert re.search(rf'File "{re.escape(str(SCRIPT))}", line \d+, in \w+$', outcome.stderr, re.MULTILINE)
    assert re.search(r"\.\.\. \d+ frames of lightning, .*torch", outcome.stderr), outcome.stderr
