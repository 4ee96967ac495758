"""The same run by the command line."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from tests.harness import run_script


def losses(run: Path, name: str) -> list[float]:
    with open(run / "csv" / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def test_the_global_batch_of_a_config_is_all_that_a_run_hangs_on(tmp_path: Path) -> None:
    same = [sys.executable, "-m", "lightning_lockstep.train", "data.global_batch_size=64", "seed=3"]
    same += ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.max_epochs=1"]
    same += ["precision=64-true", "test=false", "checkpoint=none"]
    setups = {
        "one": ["strategy=single", "trainer.devices=1"],
        "two": ["strategy=ddp", "trainer.devices=2", "trainer.accumulate_grad_batches=2"],
    }
    for name, setup in setups.items():
        outcome = run_script([*same, *setup, f"hydra.run.dir=runs/{name}"], cwd=tmp_path, timeout=180)
        assert outcome.returncode == 0, outcome.output
    one, two = (losses(tmp_path / "runs" / name, "val_loss") for name in setups)
    # With accumulation the training loss of a row is its last micro-batch's, so weights are compared by the
    # validation loss, whose mean over batches Lightning takes in float32.
    assert len(one) == len(two) == 1 and abs(one[0] - two[0]) < 1e-7
