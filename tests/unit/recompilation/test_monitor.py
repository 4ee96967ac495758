"""RecompileMonitor in fits of a compiled module, on the CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import RecompileMonitor
from lightning_lockstep.errors import ConfigurationError

# Lightning's own use of a class of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec")
ROWS = TensorDataset(torch.ones(20, 4))


class Net(L.LightningModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        # What is looked at is how often torch's compiler runs; the code that it makes is not.
        self.compiled = torch.compile(self.layer, backend="eager", **options)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.compiled(batch[0]).sum()

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.compiled(batch[0])

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.compiled(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Validates(Net):
    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.compiled(batch[0])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def trainer(folder: Path, monitor: RecompileMonitor, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[monitor],
        **options,
    )


def test_the_smaller_last_batch_is_named_with_its_shapes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = RecompileMonitor()
    with caplog.at_level(logging.WARNING, logger="lightning_lockstep"):
        trainer(tmp_path, monitor).fit(Net(dynamic=False), DataLoader(ROWS, 6))
    first, later = monitor.steps
    assert (first.stage, first.batch_idx, first.is_expected, first.count) == ("training", 0, True, 1)
    assert (later.batch_idx, later.shapes, later.before, later.are_new) == (3, ((2, 4),), ((6, 4),), True)
    assert "expected 6, actual 2" in later.compilations[0].reason
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "training batch 3 (step 4) compiled 1 graph" in warning
    assert "its shapes (2, 4) are new, the batch before had (6, 4)" in warning
    said = capsys.readouterr().err
    assert "RecompileMonitor: training batch 0 (step 1) compiled 1 graph" in said
    assert "in the first batches, 1 graph compiled in" in said and "later: training batch 3." in said


def test_nothing_is_said_of_a_fit_whose_batches_are_alike_or_that_compiles_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = RecompileMonitor()
    trainer(tmp_path, monitor).fit(Net(dynamic=False), DataLoader(ROWS, 5))
    assert [one.is_expected for one in monitor.steps] == [True]
    module = Net()
    module.compiled = module.layer
    trainer(tmp_path, monitor).fit(module, DataLoader(ROWS, 6))
    assert monitor.steps == ()
    assert [record for record in caplog.records if record.name.startswith("lightning_lockstep")] == []


def test_evaluation_with_another_number_of_samples_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = RecompileMonitor()
    trainer(tmp_path, monitor, num_sanity_val_steps=0).fit(
        Validates(dynamic=False), DataLoader(ROWS, 5), DataLoader(ROWS, 10)
    )
    lines = [record.getMessage() for record in caplog.records if "samples at once" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("RecompileMonitor: validation takes 10 samples at once, training 5.")
    assert [(one.stage, one.is_expected) for one in monitor.steps] == [
        ("training", True),
        ("validation", True),
    ]


def test_test_and_prediction_are_looked_at_too(tmp_path: Path) -> None:
    monitor = RecompileMonitor(expected_batches=1)
    module = Net(dynamic=False)
    made = trainer(tmp_path, monitor)
    made.test(module, DataLoader(ROWS, 6), verbose=False)
    assert [(one.stage, one.batch_idx, one.is_expected) for one in monitor.steps] == [
        ("test", 0, True),
        ("test", 3, False),
    ]
    made.predict(module, DataLoader(ROWS, 4))
    assert [(one.stage, one.batch_idx) for one in monitor.steps] == [("predict", 0)]


def test_the_backward_of_a_graph_is_no_second_one(tmp_path: Path) -> None:
    """As with any backend that compiles a backward, the usual one of torch.compile included."""
    monitor = RecompileMonitor()
    module = Net(dynamic=False)
    module.compiled = torch.compile(module.layer, backend="aot_eager", dynamic=False)
    trainer(tmp_path, monitor).fit(module, DataLoader(ROWS, 6))
    assert [(one.batch_idx, one.count) for one in monitor.steps] == [(0, 1), (3, 1)]
    ((first,), (later,)) = [one.compilations for one in monitor.steps]
    assert first.what == later.what and "None" not in first.what
    assert first.seconds > 0 and "expected 6, actual 2" in later.reason


def test_an_argument_that_cannot_be_used() -> None:
    with pytest.raises(ConfigurationError, match="expected_batches=-1"):
        RecompileMonitor(expected_batches=-1)
