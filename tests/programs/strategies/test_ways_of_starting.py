"""Scripts whose ranks are spawned, forked or started by mpirun: a rank that is killed, and signals to one or to all."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.harness import start_script
from tests.models.distributed.mpi.launch import mpi_environ
from tests.models.strategies.failures import LIMIT, SCRIPT, check_kept, last_lines, run


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_a_killed_rank_is_named_with_its_signal(start: str, tmp_path: Path) -> None:
    outcome = run("kill@1", start, folder=tmp_path)
    assert outcome.returncode == 128 + signal.SIGKILL, outcome.output
    assert re.search("rank 1 of 2 .* was killed by SIGKILL", last_lines(outcome.stderr))
    check_kept(tmp_path, 1, "killed by SIGKILL")


def test_sigterm_to_one_rank_ends_all_after_the_batch(tmp_path: Path) -> None:
    outcome = run("term@1", "fork", folder=tmp_path)
    assert outcome.returncode == 128 + signal.SIGTERM, outcome.output


@pytest.mark.parametrize("start", ["spawn", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_a_signal_to_the_started_process_saves_a_checkpoint_first(start: str, tmp_path: Path) -> None:
    env = mpi_environ() if start == "mpi" else None
    with start_script([str(SCRIPT), "endless", start], env=env, cwd=tmp_path) as script:
        script.wait_for("trains", timeout=LIMIT)
        script.send_signal(signal.SIGTERM)
        outcome = script.finish(LIMIT)
    assert outcome.returncode == 75 and outcome.leftovers == (), outcome.output
    assert (tmp_path / "stopped" / "preempted.ckpt").exists()
