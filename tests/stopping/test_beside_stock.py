"""Lightning's own callback on the same cases: what hangs, what drifts."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path

from tests.helpers import run_ranks, run_ranks_raw
from tests.stopping.fits import early_stopping_case, world_rank

# Stands for "hangs": much longer than a reduction of one number takes, much shorter than gloo's 30 minutes.
STUCK = 4.0


def hanging(folder: str) -> dict:
    """Rank 1 raises alone and stays; rank 0 tells where it has been for STUCK seconds, and ends itself."""
    told = Path(folder, "told")
    if world_rank() == 0:
        threading.Thread(target=tell_when_stuck, args=(threading.main_thread().ident, told)).start()
        return early_stopping_case("only rank 0 has it", folder, True)
    value = early_stopping_case("only rank 0 has it", folder, True)
    deadline = time.monotonic() + 60
    while not told.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def tell_when_stuck(thread: int, told: Path) -> None:
    since: float | None = None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        names = [frame.name for frame in traceback.extract_stack(sys._current_frames()[thread])]
        inside = "reduce_boolean_decision" in names and "barrier" in names
        since = (since or time.monotonic()) if inside else None
        if since is not None and time.monotonic() - since > STUCK:
            print(
                "rank 0 is stuck in", " > ".join(names[names.index("reduce_boolean_decision") :]), flush=True
            )
            told.touch()
            os._exit(3)
        time.sleep(0.05)


def test_lightnings_callback_hangs_on_a_metric_of_one_rank(tmp_path):
    outcomes = run_ranks_raw(2, hanging, str(tmp_path), backend=None, timeout=90)
    assert outcomes[0].returncode == 3
    assert "rank 0 is stuck in reduce_boolean_decision > reduce" in outcomes[0].stdout
    assert outcomes[1].value["error"] == "RuntimeError"
    assert "not available" in outcomes[1].value["message"]


def drifting(folder: str) -> dict:
    return {case: early_stopping_case(case, folder, True) for case in ("different values", "nan on rank 1")}


def test_lightnings_counters_and_reasons_drift_apart(tmp_path):
    first, second = run_ranks(2, drifting, str(tmp_path), backend=None, timeout=60)
    case = "different values"
    assert first[case]["wait_count"] != second[case]["wait_count"]
    assert first[case]["best_score"] != second[case]["best_score"]
    assert first[case]["reason"] == "NOT_STOPPED" and second[case]["reason"] == "PATIENCE_EXHAUSTED"
    case = "nan on rank 1"
    assert first[case]["reason"] == "NOT_STOPPED" and second[case]["reason"] == "NON_FINITE_METRIC"
    assert first[case]["stopped_epoch"] == second[case]["stopped_epoch"] == 1
