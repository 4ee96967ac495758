"""`debug=preflight`: the checks for the chosen strategy, before any rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_script
from tests.models.application.command_lines import TRAIN
from tests.models.distributed.mpi.launch import mpi_environ

PREFLIGHT = [*TRAIN, "debug=preflight", "trainer.accelerator=cpu"]


@pytest.mark.mpi
def test_a_problem_stops_the_run_with_the_table(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("no-such-host.invalid slots=1\n")
    command = [*PREFLIGHT, "strategy=mpi", f"strategy.hostfile={tmp_path / 'hosts'}", "trainer.devices=1"]
    outcome = run_script([*command, f"hydra.run.dir={tmp_path / 'run'}"], env=mpi_environ(), timeout=120)
    assert outcome.returncode == 2 and not outcome.timed_out, outcome.output
    assert "Could not resolve hostname no-such-host.invalid" in " ".join(outcome.stderr.split()), outcome.stderr
    assert "debug=preflight: the checks above found problems." in outcome.stderr
    assert not (tmp_path / "run").exists()
