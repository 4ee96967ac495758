"""No size is found with which the run could not begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import AutoBatchSize, BatchSizeError, ConfigurationError, EffectiveBatchSize
from lightning_lockstep.batch_size.trial import batches_fault, largest_runnable
from lightning_lockstep.distributed import current_communicator
from tests.common.batch_size.models import PassedIn, Walled, largest, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.allow_leaks("env:POPULATE", "env"),
]


class Loaders(Walled):
    """Training and validation of so many samples; ``largest`` is what the loader's hook takes."""

    def __init__(self, *, largest: int = 10**9, **options: Any) -> None:
        super().__init__(rows=100)
        self.largest, self.options = largest, options

    def train_dataloader(self) -> DataLoader[Any]:
        if self.batch_size > self.largest:
            raise ValueError(f"at most {self.largest}")
        return DataLoader(TensorDataset(torch.randn(100, 20)), batch_size=self.batch_size, **self.options)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(40, 20)), batch_size=self.batch_size)


@pytest.mark.parametrize(
    ("size", "loaders", "settings", "reason"),
    [
        (100, {"drop_last": True}, {}, ""),  # a loader without a batch: Lightning goes past it without a step
        (33, {}, {"limit_train_batches": 0.25}, "limit_train_batches=0.25 of 3"),
        (
            24,
            {},
            {"val_check_interval": 5, "limit_val_batches": 1.0},
            "val_check_interval=5 is more than the 4",
        ),
        (39, {}, {"limit_val_batches": 0.5}, "limit_val_batches=0.5 of 1"),
        (60, {"largest": 60}, {}, "at most 60"),
    ],
)
@pytest.mark.parametrize("limit", ["shard", None])
def test_the_largest_size_that_can_be_run_is_found(tmp_path, capfd, size, loaders, settings, reason, limit):
    module, finder = Loaders(**loaders), largest("power", limit=limit, max_val=1000)
    run = trainer(tmp_path, finder, max_steps=1, **settings)
    run.fit(module)
    assert finder.optimal_batch_size == size and run.global_step == 1
    assert reason in capfd.readouterr().err
    module.batch_size = size + 1
    without = trainer(tmp_path, max_steps=1, **settings)
    try:  # Lightning agrees that the next one is too large
        without.fit(module)
    except (ValueError, MisconfigurationException):
        return
    assert without.global_step == 0


def test_a_loader_that_was_passed_and_drops_its_last_batch(tmp_path):
    loader = DataLoader(TensorDataset(torch.randn(90, 20)), batch_size=8, drop_last=True)
    module, finder = PassedIn(), largest("power", limit=None)
    run = trainer(tmp_path, finder)
    run.fit(module, loader)
    assert finder.optimal_batch_size == module.batch_size == 90 and module.sizes == [90, 90]


def test_without_a_limit_samples_are_repeated(tmp_path):
    finder = largest("power", limit=None, max_val=256)
    run = trainer(tmp_path, finder)
    run.fit(Loaders())
    assert finder.optimal_batch_size == 256 and run.global_step == 2


def test_the_search_for_what_can_be_run_asks_little():
    asked: list[int] = []

    def why_not(size: int) -> str:
        asked.append(size)
        return f"{size} is too many" if size > 673 else ""

    alone = current_communicator()
    assert largest_runnable(why_not, most=673, communicator=alone) == (673, "") and asked == [673]
    assert largest_runnable(why_not, most=8192, communicator=alone) == (673, "674 is too many (rank 0)")
    assert len(asked) <= 16
    with pytest.raises(BatchSizeError, match="not even 1: never"):
        largest_runnable(lambda size: "never", most=8, communicator=alone)
    assert (
        batches_fault(0, 0, "limit") == batches_fault(3, 2, "limit") == batches_fault(2, 0.5, "limit") == ""
    )


def test_two_global_batches_are_one_too_many(tmp_path):
    with pytest.raises(MisconfigurationException, match="global batches of 16 and 32: expected one"):
        trainer(tmp_path, AutoBatchSize(global_batch_size=16), EffectiveBatchSize(32)).fit(Walled())


def test_the_former_name_of_the_global_batch_is_read_with_a_note() -> None:
    with pytest.warns(FutureWarning, match=r"is called global_batch_size, the one name") as noted:
        assert AutoBatchSize(effective_batch_size=16).settings.global_batch_size == 16
    assert noted[0].filename == __file__, "the note points at the line that has the former name"
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ConfigurationError, match="expected None together with global"),
    ):
        AutoBatchSize(global_batch_size=8, effective_batch_size=16)
