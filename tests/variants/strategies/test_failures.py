"""Scripts as users start them: failures and ways of starting that are not in ``tests/programs``."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.harness import Script, run_script, start_script
from tests.models.distributed.mpi.launch import mpi_environ
from tests.models.strategies.failures import LIMIT, SAVED, SCRIPT, check_kept, last_lines, run
from tests.programs.strategies.test_ways_of_starting import TORCHRUN


def test_an_error_of_ours_on_all_ranks_is_its_message_alone(tmp_path: Path) -> None:
    """Without the rank that torch's hook puts in front of each line."""
    outcome = run("ours@all", folder=tmp_path)
    assert outcome.returncode == 1 and outcome.stderr.rstrip().endswith(SAVED)
    first = json.loads((tmp_path / "failure.json").read_text())["rank"]
    check_kept(tmp_path, first, "BatchSizeError: nothing fits")
    assert "BatchSizeError: nothing fits" in last_lines(outcome.stderr)
    assert "[rank" not in outcome.stderr, outcome.stderr


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    """And with where the others were."""
    outcome = run("kill@1", folder=tmp_path)
    assert outcome.returncode == 128 + signal.SIGKILL
    place = "while the others were at epoch 0, step 5, batch 5, stage train"
    assert re.search(rf"rank 1 of 2 .* was killed by SIGKILL {place}", last_lines(outcome.stderr))
    assert outcome.stderr.rstrip().endswith(SAVED)
    check_kept(tmp_path, 1, "killed by SIGKILL")


def test_sigterm_ends_a_prediction() -> None:
    outcome = run("predict@0")
    assert outcome.returncode == 128 + signal.SIGTERM, outcome.output
    assert "predicted all" not in outcome.stdout


def endless(method: str, folder: Path) -> Script:
    env = mpi_environ() if method == "mpi" else None
    return start_script([str(SCRIPT), "endless", method], env=env, cwd=folder)


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["mpi", "spawn", "fork"])
def test_ranks_end_when_the_started_process_is_killed(method: str, tmp_path: Path) -> None:
    with endless(method, tmp_path) as script:
        script.wait_for("trains", timeout=LIMIT)
        script.send_signal(signal.SIGKILL)
        outcome = script.finish(LIMIT, settle=30)
    assert outcome.leftovers == (), outcome.output


def test_forked_ranks_finish_after_a_trainer_of_one_rank() -> None:
    """This process was the one rank of an earlier Trainer, which had a port of its own."""
    outcome = run("alone-first", "fork")
    assert outcome.returncode == 0, outcome.output
    assert "rank 0 fitted" in outcome.stdout


def test_under_torchrun_the_summary_names_the_rank_that_failed(tmp_path: Path) -> None:
    outcome = run_script([*TORCHRUN, str(SCRIPT), "raise@1"], timeout=LIMIT, cwd=tmp_path)
    assert not outcome.timed_out
    assert outcome.returncode == 1
    end = last_lines(outcome.stderr, 4)
    assert f"ValueError: boom in training_step\n  {SAVED}" in end
    check_kept(tmp_path, 1, "ValueError: boom in training_step")
    # Once and last; of the other rank there is one line.
    assert outcome.stderr.count("Traceback (most recent call last):\n  ...") == 1, outcome.stderr
    others, _, cause = outcome.stderr.rpartition("Root Cause (first observed failure)")
    assert re.search(r"rank +: 1 ", cause) and "another rank failed first: rank 1 of 2" in others


def test_torchruns_sigterm_to_the_others_is_not_taken_for_the_failure(tmp_path: Path) -> None:
    """Rank 0 waits for the other one's numbers, in no collective that could break, as torchrun ends it."""
    outcome = run_script([*TORCHRUN, str(SCRIPT), "end@1"], timeout=LIMIT, cwd=tmp_path)
    assert outcome.returncode == 1 and not outcome.timed_out, outcome.output
    assert re.search(r"lightning-lockstep: rank 1 of 2 .*its process has ended", outcome.stderr), outcome.output
    assert "received SIGTERM" not in outcome.output
