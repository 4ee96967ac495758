"""Scripts as users start them: failures and ways of starting that are not in ``tests/programs``."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.common.distributed.mpi.launch import mpi_environ
from tests.common.strategies.failures import LIMIT, SAVED, SCRIPT, check_kept, last_lines, run
from tests.helpers import Script, run_script, start_script


def test_an_error_of_ours_on_all_ranks_is_its_message_alone(tmp_path: Path) -> None:
    """Without the rank that torch's hook puts in front of each line."""
    outcome = run("ours@all", folder=tmp_path)
    assert outcome.returncode == 1 and outcome.stderr.rstrip().endswith(SAVED)
    first = json.loads((tmp_path / "failure.json").read_text())["rank"]
    check_kept(tmp_path, first, "BatchSizeError: nothing fits")
    assert "BatchSizeError: nothing fits" in last_lines(outcome.stderr)
    assert "[rank" not in outcome.stderr, outcome.stderr


def test_a_failure_that_the_program_catches_on_all_ranks_is_survived() -> None:
    """Also if the program ends then, later than the grace period; that it may fit again is in the soak."""
    outcome = run("pruned")
    assert outcome.returncode == 0, outcome.output
    caught = sorted(line for line in outcome.stdout.splitlines() if "caught" in line)
    assert caught == ["caught on rank 0", "caught on rank 1"]
    assert "fitted" not in outcome.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_with_its_signal(rank: int, tmp_path: Path) -> None:
    """And with where the others were; of a killed rank 0 the next one prints and keeps the report."""
    outcome = run(f"kill@{rank}", folder=tmp_path)
    assert outcome.returncode == (-signal.SIGKILL if rank == 0 else 128 + signal.SIGKILL)
    if rank == 1:
        place = "while the others were at epoch 0, step 5, batch 5, stage train"
        assert re.search(rf"rank 1 of 2 .* was killed by SIGKILL {place}", last_lines(outcome.stderr))
    else:
        assert "rank 0 of 2" in outcome.stderr and "was lost" in outcome.stderr
    assert outcome.stderr.rstrip().endswith(SAVED)
    check_kept(tmp_path, rank, "killed by SIGKILL" if rank else "has ended without a report")


def test_sigterm_to_one_rank_ends_all_with_its_exit_code() -> None:
    outcome = run("term@1")
    assert outcome.returncode == 128 + signal.SIGTERM
    _, _, report = outcome.stderr.rpartition("\nlightning-lockstep: ")
    assert report.startswith("rank 1 of 2 ") and "Traceback" not in report
    assert "SIGTERMException: it received SIGTERM" in report, outcome.stderr


def test_ctrl_c_in_one_rank_ends_all_with_130(tmp_path: Path) -> None:
    outcome = run_script([str(SCRIPT), "interrupt@1"], timeout=LIMIT, cwd=tmp_path)
    assert outcome.returncode == 130, outcome.output
    assert (tmp_path / "saved" / "step=4.ckpt").exists()


def test_sigterm_ends_a_prediction() -> None:
    outcome = run("predict@0")
    assert outcome.returncode == 128 + signal.SIGTERM, outcome.output
    assert "predicted all" not in outcome.stdout


def test_a_closed_standard_error_ends_no_run() -> None:
    outcome = run_script(["bash", "-c", '"$0" "$1" none 2>&-', sys.executable, str(SCRIPT)], timeout=LIMIT)
    assert outcome.stdout.count("fitted") == 2 and outcome.stdout.count("validated") == 2, outcome.output
    assert outcome.returncode in (0, 120), "120 is Python's own for a stream that it cannot flush"
    assert outcome.leftovers == ()


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


def test_sigterm_to_all_forked_ranks_ends_the_program() -> None:
    """Lightning's exception for it is a SystemExit without a code."""
    outcome = run("term@all", "fork")
    assert outcome.returncode == 128 + signal.SIGTERM
    end = "SIGTERMException: it received SIGTERM\nThe other ranks were stopped.\n"
    assert outcome.stderr.rstrip().endswith(end + SAVED)


def test_forked_ranks_finish_after_a_trainer_of_one_rank() -> None:
    """This process was the one rank of an earlier Trainer, which had a port of its own."""
    outcome = run("alone-first", "fork")
    assert outcome.returncode == 0, outcome.output
    assert "rank 0 fitted" in outcome.stdout
