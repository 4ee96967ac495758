"""AutoBatchSize and LockstepTuner in programs that were written for Lightning's BatchSizeFinder and Tuner."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import AutoBatchSize, ConfigurationError, LockstepTuner
from tests.common.batch_size.models import Walled, largest, trainer
from tests.common.batch_size.same_run import strategy_for
from tests.helpers import run_ranks, world_size

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.allow_leaks("env:POPULATE", "env"),
]


def on(ranks: int, folder: Any, *callbacks: Any, **settings: Any) -> pl.Trainer:
    return trainer(folder, *callbacks, devices=ranks, strategy=strategy_for(ranks), **settings)


@pytest.mark.parametrize(("wall", "init_val", "max_val"), [(600, 2, 8192), (600, 3, 8192), (10**9, 2, 64)])
def test_power_answers_what_lightnings_answers(tmp_path, wall, init_val, max_val):
    answers = []
    for kind in (BatchSizeFinder, largest):
        module, finder = Walled(wall), kind("POWER", 1, init_val, 25, "batch_size", 0.05, max_val)
        trainer(tmp_path, finder).fit(module)
        answers.append((finder.optimal_batch_size, module.batch_size, module.sizes[-1]))
    assert answers[0] == answers[1]


def test_binsearch_answers_nearly_what_lightnings_answers(tmp_path):
    answers = []
    for kind in (BatchSizeFinder, largest):
        finder = kind(mode="binsearch", steps_per_trial=1, margin=0.1)
        trainer(tmp_path, finder).fit(Walled(600))
        answers.append(finder.optimal_batch_size)
    assert 0.98 * answers[0] <= answers[1] <= answers[0] == 540


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_the_other_loops_answer_what_lightnings_answer(tmp_path, fn):
    answers = []
    for kind in (BatchSizeFinder, largest):
        module, finder = Walled(100), kind("power", max_val=512)
        getattr(trainer(tmp_path, finder, limit_val_batches=1.0), fn)(module)
        answers.append((finder.optimal_batch_size, module.sizes[-1]))
    assert answers[0] == answers[1] == (64, 4000 % 64)


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
    with pytest.raises(ValueError, match="mode='fast'"):
        AutoBatchSize("fast")
    with pytest.raises(ConfigurationError) as caught:
        AutoBatchSize("power", 0, margin=1.0)
    assert len(caught.value.faults) == 2


def test_what_is_missing_is_caught_as_lightnings(tmp_path):
    for kind in (BatchSizeFinder, largest):
        with pytest.raises(MisconfigurationException, match="micro"):
            trainer(tmp_path, kind(batch_arg_name="micro")).fit(Walled())


class AtMilestones(AutoBatchSize):
    """The example of Lightning's documentation."""

    def __init__(self, milestones: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.milestones, self.found = milestones, list[Any]()

    def on_fit_start(self, *args: Any, **kwargs: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch in self.milestones:
            self.scale_batch_size(trainer, pl_module)
            self.found.append(self.optimal_batch_size)


class Unfreezing(Walled):
    """Has less room from its third epoch on; trains on shuffled numbers and validates."""

    def __init__(self) -> None:
        super().__init__(100)
        self.seen, self.validated = list[tuple[int, torch.Tensor]](), list[tuple[int, int]]()

    def full(self, size: int, index: int | None = None) -> bool:
        return size > (100 if self.current_epoch < 2 else 20)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.current_epoch, batch[0][:, 0].clone()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append((self.current_epoch, len(batch[0])))

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.arange(256.0)[:, None].expand(256, 20)
        return DataLoader(TensorDataset(data), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(200, 20)), batch_size=self.batch_size)


def trains_by_milestones(ranks: int, folder: str) -> Any:
    module, finder = Unfreezing(), AtMilestones((0, 2), "power", 1, global_batch_size="largest")
    on(ranks, folder, finder, max_steps=-1, max_epochs=4, limit_val_batches=1.0).fit(module)
    seen = [torch.cat([rows for epoch, rows in module.seen if epoch == n]).tolist() for n in range(4)]
    sizes = [len(next(rows for epoch, rows in module.seen if epoch == n)) for n in range(4)]
    return (
        finder.found,
        sizes,
        [next(size for epoch, size in module.validated if epoch == n) for n in range(4)],
        seen,
    )


@world_size(1, 2)
def test_a_subclass_searches_again_at_epochs_of_its_own(world_size, tmp_path):
    answers = run_ranks(
        world_size, trains_by_milestones, world_size, str(tmp_path), backend=None, timeout=120
    )
    for found, sizes, validated, seen in answers:
        assert found == [64, 16] and sizes == [64, 64, 16, 16] and validated == sizes
        assert seen[2] != seen[0] and seen[2] != seen[3], "an order of another epoch"
    for epoch in range(4):
        rows = [row for answer in answers for row in answer[3][epoch]]
        assert sorted(rows) == list(range(256)), "each sample once an epoch"


def test_a_resumed_run_searches_again_where_a_subclass_asks_for_it(tmp_path):
    settings = {"max_steps": -1, "enable_checkpointing": True}
    first = trainer(
        tmp_path, AtMilestones((0,), "power", 1, global_batch_size="largest"), max_epochs=1, **settings
    )
    first.fit(Unfreezing())
    first.save_checkpoint(tmp_path / "last.ckpt")
    finder = AtMilestones((2,), "power", 1, global_batch_size="largest")
    resumed = trainer(tmp_path, finder, max_epochs=3, **settings)
    resumed.fit(Unfreezing(), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert finder.found == [16]


class WithRate(Walled):
    lr = 0.1


def tunes(ranks: int, folder: str) -> Any:
    rates = LockstepTuner(on(ranks, folder)).lr_find(WithRate(), num_training=5, update_attr=False)
    assert len(rates.results["lr"]) >= 4, (
        "Lightning's own search of a learning rate ends its run in the same way"
    )
    module, run = Walled(100, on_rank=ranks - 1), on(ranks, folder)
    before = list(run.callbacks)
    size = LockstepTuner(run).scale_batch_size(module, mode="power", steps_per_trial=1)
    # Those that a strategy of ours adds to any run stay.
    steps, callbacks_kept = run.global_step, run.callbacks[: len(before)] == before
    run.fit(module)
    tested = LockstepTuner(run).scale_batch_size(module, method="test", mode="binsearch", margin=0.0)
    assert all(part.training for part in module.modules()), (
        "a fit after it would train in the mode of evaluation"
    )
    return size, steps, callbacks_kept, module.sizes, run.global_step, tested, module.batch_size


@world_size(1, 2)
def test_the_tuner_scales_and_the_run_goes_on_with_the_size(world_size, tmp_path):
    answers = run_ranks(world_size, tunes, world_size, str(tmp_path), backend=None, timeout=120)
    for size, steps, callbacks_kept, sizes, afterwards, tested, now in answers:
        assert (size, steps, callbacks_kept, sizes[:2], afterwards) == (64, 0, True, [64, 64], 2)
        assert 98 <= tested <= 100 and now == tested == answers[0][5]


def test_the_tuner_answers_what_lightnings_answers(tmp_path):
    answers = []
    for kind in (Tuner, LockstepTuner):
        module = Walled(600)
        size = kind(trainer(tmp_path)).scale_batch_size(module, None, None, None, None, "fit", "power", 1)
        answers.append((size, module.batch_size))
    assert answers[0] == answers[1] == (512, 512)


def test_the_tuner_names_what_it_cannot_use(tmp_path):
    tuner = LockstepTuner(trainer(tmp_path, AutoBatchSize()))
    with pytest.raises(MisconfigurationException) as caught:
        tuner.scale_batch_size(Walled(), train_dataloaders=[], method="tst", mode="off")
    assert isinstance(caught.value, ConfigurationError) and len(caught.value.faults) == 4
    spawned = trainer(tmp_path, strategy="lockstep_ddp_spawn", devices=2)
    with pytest.raises(ConfigurationError, match="ranks that run the whole program"):
        LockstepTuner(spawned).scale_batch_size(Walled())
    failing, run = Walled(0), trainer(tmp_path)
    before = list(run.callbacks)
    with pytest.raises(RuntimeError, match="1 does not fit"):
        LockstepTuner(run).scale_batch_size(failing)
    assert run.callbacks == before and failing.batch_size == 4
