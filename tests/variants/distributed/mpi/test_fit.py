"""Fits under an mpirun of each MPI, a foreign mpiexec, and a second Ctrl-C."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.harness import Script, run_script
from tests.models.distributed.mpi.launch import HERE, mpi_command, mpi_environ, why_no

pytestmark = pytest.mark.mpi
FIT = str(HERE / "program_fit.py")


def needs(kind: str) -> None:
    if reason := why_no(kind):
        pytest.skip(reason)


@pytest.mark.parametrize(("kind", "ranks"), [("mpich", 2), ("open_mpi", 4)])
def test_fit_under_mpirun(kind: str, ranks: int, tmp_path: Path) -> None:
    needs(kind)
    outcome = run_script([*mpi_command(kind, ranks), FIT, str(tmp_path)], env=mpi_environ(), timeout=120)
    assert outcome.returncode == 0, outcome.output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert [one["rank"] for one in found] == list(range(ranks))
    assert {(one["world"], one["backend"]) for one in found} == {(ranks, "mpi4py")}
    assert len({(one["weights"], one["val_loss"]) for one in found}) == 1
    assert outcome.leftovers == ()


def test_the_trainer_and_mpirun_disagree(tmp_path: Path) -> None:
    command = [*mpi_command("open_mpi", 2), FIT, str(tmp_path), "--devices", "3"]
    outcome = run_script(command, env=mpi_environ(), timeout=120)
    assert outcome.returncode != 0 and not list(tmp_path.iterdir())
    assert "LaunchError: The Trainer and Open MPI's mpirun disagree" in outcome.output


def test_a_foreign_mpiexec_is_one_error(tmp_path: Path) -> None:
    """MPICH's mpiexec starts Pythons whose mpi4py loads Open MPI."""
    needs("mpich")
    command = [*mpi_command("mpich", 2)[:-1], sys.executable, FIT, str(tmp_path)]
    outcome = run_script(command, env=mpi_environ(), timeout=90)
    assert outcome.returncode != 0
    assert re.search(r"rank 1, one of at least 2, is rank 0 of 1 in Open MPI", outcome.output), outcome.output


def test_a_second_ctrl_c_ends_mpirun_and_all_ranks_too(tmp_path: Path) -> None:
    command = [sys.executable, FIT, str(tmp_path), "--devices", "2", "--slow", "--epochs", "500"]
    with Script(command, env=mpi_environ()) as script:
        script.wait_for("TRAINING")
        for _ in range(2):
            script.interrupt()
            time.sleep(0.3)  # as fast as somebody presses it again
        outcome = script.finish(timeout=60)
    assert outcome.returncode == 130 and outcome.leftovers == (), outcome.output
    assert "Traceback" not in outcome.output, outcome.output
