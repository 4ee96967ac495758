"""No size is found with which the run could not begin, and every attribute of the size's name follows the search."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_lockstep import AutoBatchSize, BatchSizeError, ConfigurationError, EffectiveBatchSize
from lightning_lockstep.batch_size.trial import batches_fault, largest_runnable
from lightning_lockstep.demo.images import ConvNet, DigitsData
from lightning_lockstep.distributed import current_communicator
from tests.common.batch_size.models import FULL, PassedIn, Walled, largest, trainer
from tests.common.batch_size.same_run import strategy_for
from tests.helpers import run_ranks, world_size

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


def runs_digits(ranks: int, folder: str) -> list[Any]:
    found = []
    effective = EffectiveBatchSize(512, lr_scaling="linear", reference_batch_size=256)
    for limit, accumulate, others in (("shard", 3, []), (None, 1, []), (None, 16, [effective])):
        data, finder = DigitsData(seed=5), (AutoBatchSize if others else largest)("power", 1, 64, limit=limit)
        run = trainer(
            folder,
            *others,
            finder,
            devices=ranks,
            strategy=strategy_for(ranks),
            max_steps=1,
            accumulate_grad_batches=accumulate,
        )
        run.fit(ConvNet(width=8, learning_rate=3e-3), data)
        rate = run.optimizers[0].param_groups[0]["lr"] / 3e-3
        found.append((data.batch_size, run.accumulate_grad_batches, run.global_step, round(rate, 6)))
    return found


@world_size(1, 2)
def test_global_batches_stay_within_the_data(world_size, tmp_path):
    answers = run_ranks(world_size, runs_digits, world_size, str(tmp_path), backend=None, timeout=170)
    data = DigitsData()
    data.setup("fit")
    samples = len(data.train_dataloader().dataset)
    for answer in answers:
        assert answer[0] == (samples // (3 * world_size), 3, 1, 1.0)
        assert answer[1] == (samples // world_size, 1, 1, 1.0)
        assert answer[2] == (512 // world_size, 1, 1, 2.0), "divided and scaled once"


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


class Uneven(PassedIn):
    """Makes loaders of which those of rank 1 are small."""

    def train_dataloader(self) -> DataLoader[Any]:
        rows = 90 if self.global_rank == 0 else 30
        return DataLoader(TensorDataset(torch.randn(rows, 20)), batch_size=self.batch_size, drop_last=True)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Streams(PassedIn):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Endless(), batch_size=self.batch_size)


class Everywhere(pl.LightningModule):
    """Reads the size wherever it is; fails in ``how`` on the last rank when a batch has more than ``wall``."""

    def __init__(self, wall: int, how: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)
        self.wall, self.how, self.sizes = wall, how, list[int]()
        self.save_hyperparameters({"batch_size": 4})

    @property
    def batch_size(self) -> int:
        return int(self.hparams["batch_size"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert sizes_of(self) == {len(batch[0])}, "a step of another size than the attributes say"
        if len(batch[0]) > self.wall and self.global_rank == self.trainer.world_size - 1:
            raise RuntimeError(FULL) if self.how == "memory" else KeyError("a bug")
        return self.layer(batch[0]).pow(2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"batch_size": 4})
        self.batch_size = 4

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(4000, 20)), batch_size=self.batch_size)


def sizes_of(module: Everywhere) -> set[int]:
    data: Any = module.trainer.datamodule
    return {module.batch_size, module.hparams["batch_size"], data.batch_size, data.hparams["batch_size"]}


class Survived(AutoBatchSize):
    """Notes how a search failed, and what it left behind."""

    failed: tuple[set[int], str, int | None] | None = None

    def find(self, trainer: Any, pl_module: Any) -> int | None:
        try:
            return super().find(trainer, pl_module)
        except Exception as error:
            self.failed = sizes_of(pl_module), type(error).__name__, self.optimal_batch_size
            return None


def searches(ranks: int, folder: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, wall, how in (("fits", 300, "memory"), ("full", 0, "memory"), ("bug", 20, "bug")):
        module, finder = Everywhere(wall, how), Survived("power", global_batch_size="largest")
        options = {"devices": ranks, "strategy": strategy_for(ranks), "max_steps": 2 if name == "fits" else 0}
        trainer(folder, finder, **options).fit(module, Data())
        told[name] = finder.failed or (sizes_of(module), module.sizes, finder.optimal_batch_size)
    for name, streams in (("uneven", Uneven()), ("stream", Streams())):
        options = {"devices": ranks, "strategy": strategy_for(ranks), "max_steps": 1}
        run = trainer(folder, largest("power", limit=None), use_distributed_sampler=False, **options)
        try:
            run.fit(streams)
        except BatchSizeError as error:
            told[name] = (str(error), streams.batch_size)
        else:
            told[name] = (streams.batch_size, streams.sizes)
    return told


@world_size(1, 2)
def test_attributes_follow_the_search_and_come_back_after_a_failure(world_size, tmp_path):
    answers = run_ranks(world_size, searches, world_size, str(tmp_path), backend=None, timeout=120)
    smallest = 90 if world_size == 1 else 30
    for told in answers:
        assert told["fits"] == ({256}, [256, 256], 256)
        assert told["full"] == ({4}, "BatchSizeError", None)
        assert told["bug"][0] == {4} and told["bug"][2] is None
        assert told["stream"][1] == 4 and "IterableDataset, which has no length" in told["stream"][0]
        assert told["uneven"][0] == smallest, "what every rank can run"
    assert [told["bug"][1] for told in answers] == [*["BatchSizeError"] * (world_size - 1), "KeyError"]
