"""OverflowDetector on virtual XLA devices: the check is part of the compiled step, and hardly ever read."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import OverflowDetectedError, OverflowDetector
from tests.environments.xla.counters import Counts
from tests.environments.xla.digits import spmd, trainer

BATCH = 8


class Exponential(nn.Module):
    """Overflows where its input is beyond 88."""

    def forward(self, values: Tensor) -> Tensor:
        return values.exp()


class Net(L.LightningModule):
    """Batch norm has buffers that a bad batch would spoil, and dropout draws random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, width), nn.BatchNorm1d(width)
        self.exponential, self.last, self.dropout = Exponential(), nn.Linear(4, 1), nn.Dropout(0.2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (rows,) = batch
        return (
            self.dropout(self.norm(self.first(rows))).square().mean()
            + self.last(self.exponential(rows)).square().mean()
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def loader(batches: int, *bad: int) -> DataLoader[Any]:
    """Return batches of which some hold one value that overflows."""
    rows = torch.randn(batches, BATCH, 4, generator=torch.Generator().manual_seed(0))
    for batch in bad:
        rows[batch, 3, 1] = 200.0
    return DataLoader(TensorDataset(rows.flatten(0, 1)), BATCH)


def fit(folder: Path, net: Net, data: DataLoader[Any], *callbacks: L.Callback) -> None:
    torch.manual_seed(0)
    importlib.import_module("torch_xla").manual_seed(0)
    for parameter in net.parameters():  # made before the seed was set
        torch.nn.init.uniform_(parameter, -0.5, 0.5)
    trainer(folder, spmd(), callbacks=list(callbacks), max_epochs=1).fit(net, data)


@pytest.mark.parametrize("mode", ["replay", "hooks"])
def test_only_every_tenth_step_reads(tmp_path: Path, mode: Any) -> None:
    counts = Counts()
    net = Net({"replay": 5, "hooks": 6}[mode])
    fit(tmp_path, net, loader(32), OverflowDetector(mode=mode), counts)
    assert counts.reads_by_batch() == {9: 1, 19: 1, 29: 1}
    # The second step compiles with the optimizer's state, and the first look cuts a step in two.
    assert counts.compiled[1:9] == [counts.compiled[1]] * 8
    assert counts.compiled[10:] == [counts.compiled[10]] * 22


@pytest.mark.parametrize("mode", ["replay", "hooks"])
def test_each_step_is_looked_at_if_asked_and_its_module_named(tmp_path: Path, mode: Any) -> None:
    detector = OverflowDetector(mode=mode, check_every_n_steps=1)
    with pytest.raises(OverflowDetectedError, match=r"batch_number=3 \(epoch 0, batch 3, step 3\)"):
        fit(tmp_path, Net(7), loader(6, 3, 5), detector)
    (report,) = detector.reports
    assert report.producer is not None and report.producer.module == "exponential"
    assert report.producer.kind == "module" and "at [3]" in report.producer.remarks
    # Dropout drew what it drew: the replayed loss is that of the step.
    assert report.loss == float("inf") and not report.notes


def test_steps_that_are_looked_at_together_name_the_first_bad_batch(tmp_path: Path) -> None:
    detector, counts = OverflowDetector(), Counts()
    with pytest.raises(OverflowDetectedError, match="batch_number=3 "):
        fit(tmp_path, Net(7), loader(20, 3, 5), detector, counts)
    assert len(counts.reads) == 9
    assert "Found 6 batches later (check_every_n_steps=10)" in "\n".join(detector.reports[0].notes)


def test_a_bad_step_is_skipped(tmp_path: Path) -> None:
    skipped, detector = Net(9), OverflowDetector(action="skip")
    fit(tmp_path, skipped, loader(8, 3), detector)
    assert detector.skipped_steps == 1
    assert all(bool(torch.isfinite(p.cpu()).all()) for p in skipped.parameters())
