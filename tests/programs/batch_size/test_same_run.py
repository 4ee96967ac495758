"""One seed and one global batch give the same loss curve on any set-up: docs/same-run.md."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from tests.common.batch_size.same_run import SETUPS, STEPS, Variant, curves, largest_difference
from tests.helpers import run_ranks, run_script

# float32 with max pooling and AdamW is not among them: where two values of a pooling window are equal but for
# rounding, the gradient goes to one or the other (docs/same-run.md).
TOLERANCES = {
    Variant("AdamW", "64-true"): 1e-12,
    Variant("SGD", "32-true"): 1e-5,
    Variant("AdamW", "32-true", "average"): 1e-5,
}


def test_one_two_and_four_ranks_with_and_without_accumulation(tmp_path):
    reference = None
    for ranks, micro_batch in SETUPS:
        variants = list(TOLERANCES)
        (found, *_) = run_ranks(
            ranks, curves, ranks, micro_batch, variants, str(tmp_path), backend=None, timeout=170
        )
        reference = reference or found
        for variant, values, same in zip(variants, found, reference, strict=True):
            assert len(values) == STEPS and values[-1] < values[0] - 0.3
            assert largest_difference(values, same) < TOLERANCES[variant], (ranks, micro_batch, str(variant))


def losses(run: Path, name: str) -> list[float]:
    with open(run / "csv" / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def test_the_global_batch_of_a_config_is_all_that_a_run_hangs_on(tmp_path):
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
