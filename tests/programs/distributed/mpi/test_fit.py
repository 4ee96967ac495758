"""A fit for which the strategy starts mpirun, and what ends one: a rank that raises, is killed or exits, and Ctrl-C."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_lockstep.errors import CollectiveMismatchError
from tests.harness import Script, run_script
from tests.models.distributed.mpi.launch import HERE, meet, mpi_environ, run_mpi_raw

pytestmark = pytest.mark.mpi
FIT = [sys.executable, str(HERE / "program_fit.py")]


def test_it_starts_mpirun_and_labels_the_output_and_a_rank_that_raises_ends_all(tmp_path: Path) -> None:
    command = [*FIT, str(tmp_path), "--devices", "2", "--precision", "bf16-mixed", "--then", "raise"]
    outcome = run_script(command, env=mpi_environ(), timeout=120)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank, one in enumerate(found):
        assert (one["rank"], one["world"], one["backend"]) == (rank, 2, "mpi4py")
        assert one["weights"] == found[0]["weights"] and one["val_loss"] == found[0]["val_loss"]
    assert found[0]["best"].endswith(".ckpt")
    assert "[1,0]<stdout>: TRAINING" in outcome.stdout
    # In the second fit rank 1 raises.
    assert outcome.returncode not in (0, None)
    assert re.search(r"rank 1 of 2 \(host .*ValueError: a bad batch on purpose", outcome.stderr), outcome.output
    assert "Saved to " in outcome.stderr, outcome.output
    assert outcome.leftovers == ()


def test_a_rank_that_is_killed_ends_all_and_mpirun_names_it(tmp_path: Path) -> None:
    command = [*FIT, str(tmp_path), "--devices", "2", "--epochs", "1", "--then", "kill"]
    outcome = run_script(command, env=mpi_environ(), timeout=120)
    assert outcome.returncode == 137 and outcome.leftovers == (), outcome.output
    assert re.search(r"process rank 1 with PID \d+ on node \S+ exited on\s+signal 9", outcome.output), outcome.output


def exits() -> None:
    """Rank 1 exits while ranks 0 and 2 disagree and go on between themselves, and then need it."""
    rank, _ = meet(seconds=8)
    pair = dist.new_group([0, 2])
    if rank == 1:
        sys.exit(3)
    try:
        dist.all_reduce(torch.ones(3 + rank), group=pair)
    except CollectiveMismatchError as error:
        if rank == 0:
            print(error, flush=True)
    dist.all_reduce(torch.ones(3), group=pair)
    if rank == 0:
        print("the pair went on", flush=True)
    dist.all_reduce(torch.ones(3))


def test_ranks_wait_until_the_timeout_for_one_that_has_ended_its_program() -> None:
    outcome, _ = run_mpi_raw(3, exits)
    assert outcome.returncode != 0 and not outcome.timed_out, outcome.output
    assert "the pair went on" in outcome.output
    # In a sub-group too, a report names ranks by their numbers in the default group.
    row = r"  2 +all_reduce\(sum\)  float32  \(5,\) +test_fit.py:\d+ in exits  <- differs"
    assert re.search(row, outcome.output), outcome.output
    assert "timed out after 8 s over MPI: not every rank has called it" in outcome.output


def test_ctrl_c_in_the_terminal_ends_mpirun_and_all_ranks(tmp_path: Path) -> None:
    command = [*FIT, str(tmp_path), "--devices", "2", "--slow", "--epochs", "500"]
    with Script(command, env=mpi_environ()) as script:
        script.wait_for("TRAINING")
        assert len(script.descendants()) >= 3  # mpirun and the ranks
        script.interrupt()
        outcome = script.finish(timeout=60)
    assert outcome.returncode == 130 and outcome.leftovers == (), outcome.output
    assert "Traceback" not in outcome.output, outcome.output
