"""Values are read from XLA devices where they are logged only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.environments.xla.counters import device_reads
from tests.environments.xla.digits import Classifier, fitted, spmd


class Shows(Classifier):
    """Shows its loss in the progress bar, and counts how often the host reads from the device in training."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []
        self.shown: list[dict[str, Any]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True)
        return loss

    def on_train_batch_start(self, *args: Any) -> None:
        self.reads.append(device_reads())
        self.shown.append(dict(self.trainer.progress_bar_metrics))


def reads_in_training(folder: Path, **options: Any) -> tuple[dict[int, int], Shows]:
    """Fit 18 steps; return how often values were read in each, but for the last steps of the epochs of five."""
    net = Shows()
    fitted(folder, spmd(), module=net, max_steps=18, max_epochs=-1, limit_val_batches=0, **options)
    steps = [now - before for before, now in zip(net.reads, net.reads[1:], strict=False)]
    return {step: count for step, count in enumerate(steps) if step % 5 != 4}, net


def test_values_of_the_progress_bar_are_read_where_they_are_logged(tmp_path: Path) -> None:
    found, net = reads_in_training(tmp_path, log_every_n_steps=8)
    # torch-xla counts a read when it is over, which may be in the step after.
    assert {step for step, count in found.items() if count} <= {7, 8, 15, 16} and sum(found.values()) >= 2, found
    assert "shown" not in net.shown[6] and net.shown[8]["shown"] == pytest.approx(net.losses[7])
    assert net.shown[13]["shown"] == net.shown[12]["shown"], "in between it stays"
