"""The collective guard in scripts as users start them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness import start_script
from tests.models.strategies.guard import (
    LIMIT,
    SCRIPT,
    check_different,
    check_kept,
    check_stall,
    ended,
    rows,
    run,
)


def test_ranks_that_gather_different_shapes_get_one_report(tmp_path: Path) -> None:
    """gloo ends one of the two processes over it; the guard has the last word there."""
    outcome = run(tmp_path, "shapes")
    assert outcome.returncode == 1, outcome.output
    assert "CollectiveMismatchError: ranks disagree on collective #" in outcome.stderr
    assert "lightning_lockstep.gather_uneven()" in outcome.stderr
    first, second = rows(outcome.stderr)
    assert re.match(r"0 all_gather float32 \(1, 5\) guard_script.py:\d+ in part_ways", first)
    assert re.match(r"1 all_gather float32 \(1, 2, 5\) guard_script.py:\d+ in part_ways <- differs", second)
    assert "Ranks 0-1 are at epoch 0, step 3, batch 3, stage train." in outcome.stderr
    assert 'With guard="verify" (or LOCKSTEP_DEBUG=1) the ranks compare' in outcome.stderr
    check_kept(outcome, tmp_path, "CollectiveMismatchError: ranks disagree on collective #")


def test_a_rank_that_leaves_a_layer_out_under_fsdp_gathers_one_part_less(tmp_path: Path) -> None:
    expected = (r"0 all_gather float32 \(10,\)", r"1 all_reduce float32 .* <- differs")
    check_different(tmp_path, "unused", "fsdp", expected)


def test_a_rank_that_never_comes_is_named_with_its_place(tmp_path: Path) -> None:
    outcome = run(tmp_path, "sleep", "popen")
    check_stall(outcome, r"guard_script.py:\d+ in keep_waiting")
    check_kept(outcome, tmp_path, "CollectiveStallError: rank 1 never came to collective #")


def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    outcome = run(tmp_path, "stop", "popen", "grace_period=2.0")
    assert outcome.returncode != 0
    check_kept(outcome, tmp_path, "CollectiveStallError: rank 1 never came to")
    assert re.search(r"1 +- +no answer: its process \d+ is stopped, by a signal .*<- never came", outcome.stderr)


def test_a_rank_that_works_is_a_remark_and_no_error(tmp_path: Path) -> None:
    """It is made again once the wait is twice as long."""
    remark = r"rank 0 has waited (\d+) s in collective #\d+ of group 'world' .* rank 1 is still running, at"
    with start_script([str(SCRIPT), "busy", str(tmp_path), "popen", "stall_timeout=1"]) as script:
        made = script.wait_for(rf"(?s){remark}.*{remark}", timeout=LIMIT)
        assert int(made[2]) > 1.5 * int(made[1])  # both are rounded
        (tmp_path / "go").touch()
        outcome = ended(script.finish(LIMIT))
    assert outcome.returncode == 0, outcome.output
    assert not (tmp_path / "failure.json").exists()


def test_a_job_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    outcome = run(tmp_path, "pause")
    assert outcome.returncode == 0, outcome.output
    assert "never came" not in outcome.output
