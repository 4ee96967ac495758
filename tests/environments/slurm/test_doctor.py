"""The doctor as tasks of srun, on a real Slurm."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests.harness.slurm import Slurm, why_no_slurm
from tests.models.distributed.mpi.launch import mpi_environ

REASON = why_no_slurm()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm() as made:
        yield made


def test_tasks_of_two_nodes_make_one_table(slurm: Slurm) -> None:
    command = ["srun", "-N2", sys.executable, "-m", "lightning_lockstep.doctor", "network", "slurm", "--json"]
    outcome = slurm.run(command, env=mpi_environ(), timeout=120)
    assert outcome.returncode == 0 and not outcome.timed_out, outcome.output
    found = {check["check"]: check["findings"] for check in json.loads(outcome.stdout)["checks"]}
    rows = {row["subject"]: row for row in found["network"]}
    assert rows["ranks"]["evidence"].startswith("all 2 reported"), rows
    assert rows["gloo"]["status"] == "ok", rows
    [place] = [row["evidence"] for row in found["slurm"] if row["subject"] == "place"]
    assert place.startswith("task 0 of 2 in step") and place.endswith("on 2 nodes")
