"""RecompileMonitor beside torch-xla's own counters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_lockstep import RecompileMonitor
from tests.xla.digits import Classifier, fitted, spmd


class Wider(Classifier):
    """Of a size of its own: what another test of this process has compiled is not compiled again."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 93), torch.nn.ReLU(), torch.nn.Linear(93, 12))


def test_a_smaller_last_batch_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = RecompileMonitor()
    fitted(tmp_path, spmd(), module=Wider(), max_epochs=3, num_sanity_val_steps=0, callbacks=[monitor])
    training = [one for one in monitor.steps if one.stage == "training"]
    late = [one for one in training if not one.is_expected]
    first = [one.batch_idx for one in training if one.is_expected]
    assert first in ([0], [0, 1]), "the second step is compiled once more, with the optimizer's state"
    # Batch 4 has 44 samples; the first batch after an epoch meets values that the end of it has left.
    assert late[0].batch_idx == 4 and late[0].shapes == ((44, 64), (44,)) and late[0].are_new
    assert late[0].before == ((64, 64), (64,)) and late[0].seconds > 0
    assert [one for one in late if one.step > 7] == [], [one.line() for one in late]
    lines = [record.getMessage() for record in caplog.records if "RecompileMonitor" in record.getMessage()]
    assert any(
        "its shapes (44, 64), (44,) are new, the batch before had (64, 64), (64,)" in line for line in lines
    )
