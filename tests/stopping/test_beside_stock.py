"""Lightning's own callback on the same cases: what hangs, what drifts."""

from __future__ import annotations

from tests.helpers import run_ranks, run_ranks_raw
from tests.stopping.fits import early_stopping_case


def test_lightnings_callback_hangs_on_a_metric_of_one_rank(tmp_path):
    outcomes = run_ranks_raw(
        2,
        early_stopping_case,
        "only rank 0 has it",
        str(tmp_path),
        True,
        backend=None,
        timeout=30,
        allow_timeout=True,
    )
    # Rank 1 raises its error alone; rank 0 waits for it in a barrier that nobody else enters.
    assert outcomes[0].killed_by_helper or outcomes[0].value is None or "error" in outcomes[0].value
    assert outcomes[1].value["error"] == "RuntimeError"
    assert "not available" in outcomes[1].value["message"]


def test_lightnings_counters_drift_apart(tmp_path):
    values = run_ranks(
        2, early_stopping_case, "different values", str(tmp_path), True, backend=None, timeout=60
    )
    assert values[0]["wait_count"] != values[1]["wait_count"]
    assert values[0]["best_score"] != values[1]["best_score"]
    assert values[0]["reason"] == "NOT_STOPPED" and values[1]["reason"] == "PATIENCE_EXHAUSTED"
