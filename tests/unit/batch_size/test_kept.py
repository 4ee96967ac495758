"""What a fit keeps of its global batch, in one process: warnings, manual optimization, reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_lockstep import AutoBatchSize, BatchSizeError, EffectiveBatchSize
from tests.models.batch_size.models import Walled, largest, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.allow_leaks("env:POPULATE", "env"),
]

ROWS = 240


@pytest.mark.filterwarnings("default")
def test_the_largest_is_taken_where_it_is_asked_for_with_a_warning(tmp_path):
    import warnings

    said = r"batch size 64 per rank instead of 4: an epoch has fewer optimizer steps, .*size=4\) keeps"
    net, run = Walled(100, rows=ROWS), trainer(tmp_path, largest(max_val=64))
    warnings.simplefilter("always")
    with pytest.warns(UserWarning, match=said):
        run.fit(net)
    assert net.batch_size == 64
    with pytest.raises(BatchSizeError, match=r"'largest'.* ask for global batches of largest and 16"):
        trainer(tmp_path, largest(), EffectiveBatchSize(16)).fit(Walled())
    with pytest.raises(BatchSizeError, match="2 EffectiveBatchSize ask for global batches of 16 and 32: expected"):
        trainer(tmp_path, EffectiveBatchSize(16), EffectiveBatchSize(32)).fit(Walled())


class ByHand(Walled):
    def __init__(self, wall: int) -> None:
        super().__init__(wall, batch_size=12)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()


def test_manual_optimization_keeps_a_batch_that_fits_and_says_what_to_write_for_one_that_does_not(tmp_path):
    callback, net = AutoBatchSize(), ByHand(20)
    trainer(tmp_path, callback).fit(net)
    assert callback.optimal_batch_size == 12 and net.sizes == [12, 12]
    with pytest.raises(BatchSizeError, match=r"12 per rank are configured.*manual optimization.*'largest'"):
        trainer(tmp_path, AutoBatchSize()).fit(ByHand(10))
    net = ByHand(10)
    trainer(tmp_path, largest(margin=0)).fit(net)
    assert net.sizes == [10, 10]


def test_a_report_is_in_the_folder_of_the_run(tmp_path, monkeypatch, capfd):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for logger in (False, pl.loggers.CSVLogger("logs")):
        run = trainer(tmp_path / "here", AutoBatchSize(), logger=logger, limit_val_batches=1.0)
        run.validate(Walled(100), verbose=False)
        run.fit(Walled())
        (written,) = Path().rglob("batch_size*")
        assert str(written) == ("logs/lightning_logs/version_0/batch_size.json" if logger else "batch_size.json")
        assert json.loads(written.read_text())["accumulate"] == 1
        written.unlink()
    said = capfd.readouterr().err
    assert "4 fits and nothing larger is tried: it is a rank's share of the global batch of 4, as config" in said
    assert re.search(r"batch size 9\d per rank\n", said), "an evaluation has no optimizer steps"


def test_two_global_batches_are_one_too_many(tmp_path):
    with pytest.raises(MisconfigurationException, match="global batches of 16 and 32: expected one"):
        trainer(tmp_path, AutoBatchSize(global_batch_size=16), EffectiveBatchSize(32)).fit(Walled())
