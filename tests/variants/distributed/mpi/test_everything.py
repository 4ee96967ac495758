"""What the package offers elsewhere, on ranks under a real MPI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.common.distributed.mpi.launch import run_program
from tests.helpers import ScriptOutcome

pytestmark = pytest.mark.mpi
#: Each epoch and batch of a fit.
BATCHES = [[epoch, batch] for epoch in range(2) for batch in range(12)]


def run(what: str, folder: Path) -> tuple[ScriptOutcome, list[Any]]:
    outcome, _ = run_program("open_mpi", 2, "program_everything.py", folder, arguments=[what])
    files = [folder / f"{what}-{rank}.json" for rank in (0, 1)]
    return outcome, [json.loads(file.read_text()) for file in files if file.exists()]


def test_callbacks_and_options_work_as_on_other_strategies(tmp_path: Path) -> None:
    outcome, found = run("all", tmp_path)
    assert outcome.returncode == 0 and len(found) == 2, outcome.output
    for what, seen in found[0].items():
        other = found[1][what]
        assert seen["backend"] == "mpi4py"
        assert seen["weights"] == other["weights"], what
        assert seen["global_step"] == other["global_step"], what
        if what != "overflow":
            assert seen["steps"] == other["steps"], what
    assert found[0]["uneven"]["global_step"] == 40
    stopped = found[0]["breakpoint"]["steps"]
    # Ranks agree to leave some batches after the breakpoint, on a busy machine in the next epoch.
    assert stopped == BATCHES[: len(stopped)] and 6 <= len(stopped) < len(BATCHES)
    assert "rank 1: on purpose" in outcome.output
    assert found[0]["early"]["global_step"] == 24, "two epochs of four"
    assert found[0]["batch_size"]["batch_size"] == found[1]["batch_size"]["batch_size"] == 12
    assert found[0]["overflow"]["skipped"] == found[1]["overflow"]["skipped"] == 2
    first, second = (outcome.output.find(f"rank {rank} was here") for rank in (0, 1))
    assert 0 < first < second


def test_a_preempted_run_goes_on_at_the_next_batch(tmp_path: Path) -> None:
    outcome, _ = run("preempt", tmp_path)
    assert outcome.returncode == 75, outcome.output
    assert "rank 1: received SIGTERM" in outcome.output
    outcome, found = run("resume", tmp_path)
    assert outcome.returncode == 0 and len(found) == 2, outcome.output
    for seen in found:
        assert seen["global_step"] == 24
        first = len(BATCHES) - len(seen["steps"])  # ranks agree to leave some batches after the signal
        assert first >= 6
        assert seen["steps"] == BATCHES[first:]
    assert found[0]["weights"] == found[1]["weights"]
