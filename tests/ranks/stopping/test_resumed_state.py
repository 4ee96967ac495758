"""A resumed run is the run that was never stopped: everything with a state, saved in every place, each strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.models.stopping.resumed_states import AN_EXCEPTION, table


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
