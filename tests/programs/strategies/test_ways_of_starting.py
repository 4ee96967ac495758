"""Scripts whose ranks are spawned, forked or started by mpirun or torchrun: a fit, a killed rank, signals."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.harness import run_script, start_script
from tests.models.distributed.mpi.launch import mpi_environ
from tests.models.strategies.failures import LIMIT, SCRIPT, check_kept, last_lines, run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


# `popen`: tests/programs/package/test_pytorch_lightning.py.
@pytest.mark.parametrize("start", ["spawn", "fork", "torchrun", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_a_fit_whose_ranks_are_started_as_a_user_starts_them(start: str) -> None:
    """No rank is a fork of a process that has imported everything, so a fault of an import or an exec shows."""
    command = [*TORCHRUN, str(SCRIPT), "none"] if start == "torchrun" else [str(SCRIPT), "none", start]
    env = mpi_environ() if start == "mpi" else None
    outcome = run_script(command, env=env, fresh=True, timeout=LIMIT)
    assert (outcome.returncode, outcome.leftovers) == (0, ()), outcome.output
    losses = re.findall(r"rank (\d) fitted (\S+)", outcome.stdout)
    ranks = ["0"] if start in ("spawn", "fork") else ["0", "1"]
    assert sorted(rank for rank, _ in losses) == ranks and len({loss for _, loss in losses}) == 1, losses


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
