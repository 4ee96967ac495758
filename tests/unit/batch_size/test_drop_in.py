"""AutoBatchSize in programs that were written for Lightning's BatchSizeFinder."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder

from lightning_lockstep import AutoBatchSize
from tests.models.batch_size.models import Walled, largest, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.allow_leaks("env:POPULATE", "env"),
]


def test_it_is_one_of_lightnings_and_comes_before_the_others(tmp_path):
    finder, other = AutoBatchSize(), pl.callbacks.LambdaCallback()
    run = trainer(tmp_path, other, finder)
    assert isinstance(finder, BatchSizeFinder) and run.callbacks.index(finder) < run.callbacks.index(other)
    assert finder.optimal_batch_size == 2
    run = trainer(tmp_path, finder, fast_dev_run=1)
    run.fit(Walled())
    assert finder.optimal_batch_size is None


def test_bad_arguments_are_caught_as_lightnings():
    with pytest.raises(MisconfigurationException, match="mode='fast'"):
        AutoBatchSize("fast")
    with pytest.raises(ValueError, match="mode='power'"):
        AutoBatchSize("power")


def test_what_is_missing_is_caught_as_lightnings(tmp_path):
    for kind in (BatchSizeFinder, largest):
        with pytest.raises(MisconfigurationException, match="micro"):
            trainer(tmp_path, kind(batch_arg_name="micro")).fit(Walled())
