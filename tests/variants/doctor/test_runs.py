"""The folder of a run that ended well, as the doctor reads it."""

from __future__ import annotations

from pathlib import Path

from lightning_lockstep.doctor.registry import Status
from tests.harness import run_script
from tests.models.application.command_lines import TRAIN
from tests.programs.doctor.test_run import SMALL, findings


def test_a_healthy_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [*TRAIN, *SMALL.split(), "trainer.devices=1", f"hydra.run.dir={folder}"]
    outcome = run_script(command, timeout=120)
    assert not outcome.timed_out and outcome.returncode == 0, outcome.output
    [found] = findings(folder)
    assert found.status is Status.OK and "it finished: 4 steps on 1 rank;" in found.evidence
