"""A resumed run is the run that was never stopped: everything with a state, saved in every place, each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_lockstep.stopping.resume_point import ResumePoint, settle_counters
from tests.common.stopping.resumed_states import AN_EXCEPTION, table
from tests.helpers import run_ranks


@pytest.mark.parametrize(
    "cases",
    [
        ["schedulers", "callbacks", "validates in mid-epoch", "accumulated", AN_EXCEPTION],
        ["FSDP"],
        ["DeepSpeed, stage 2"],
    ],
    ids=" and ".join,
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(cases: list[str], tmp_path: Path) -> None:
    for wrong in run_ranks(2, table, str(tmp_path), cases, backend=None, timeout=120):
        assert wrong == {}


def test_a_loader_that_saves_its_own_state_goes_on_behind_the_batch_it_gave_last() -> None:
    counters = {"ready": 3, "started": 3, "processed": 2, "completed": 2}
    epochs = {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    batches = {"total": {key: value + 5 for key, value in counters.items()}, "current": counters}
    loops: dict[str, Any] = {
        "state_dict": {"combined_loader": [{"at": 3}]},
        "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
        "epoch_loop.batch_progress": {**batches, "is_last_batch": False},
        "epoch_loop.val_loop.batch_progress": {
            "total": dict.fromkeys(counters, 0),
            "current": dict.fromkeys(counters, 0),
            "is_last_batch": False,
        },
    }
    assert settle_counters(loops, 1) == ResumePoint(1, True, 3, batch_open=True, rest_open=True)
    assert batches["total"]["ready"] == batches["total"]["completed"] == 8
