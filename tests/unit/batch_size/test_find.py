"""AutoBatchSize and EffectiveBatchSize in one process: real fits."""

from __future__ import annotations

import gc
import json
import random
import warnings
import weakref
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_lockstep import AutoBatchSize, EffectiveBatchSize
from tests.models.batch_size.models import PassedIn, Walled, largest, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.allow_leaks("env:POPULATE", "env"),
]


def test_an_attribute_of_the_module_gets_the_size(tmp_path):
    module = Walled(600)  # where else memory can run out: tests/ranks
    callback = largest()
    trainer(tmp_path, callback).fit(module)
    assert 570 * 0.96 <= module.batch_size <= 600 and callback.result.size == module.batch_size
    assert callback.result.largest >= 588 and len(callback.result.trials) <= 12
    assert module.sizes == [module.batch_size] * 2
    written = json.loads((tmp_path / "batch_size.json").read_text())
    assert written["size"] == module.batch_size and len(written["trials"]) == len(callback.result.trials)
    assert any(t["size"] == module.batch_size and t["fits"] for t in written["trials"])


class Several(Walled):
    """Its hook makes two loaders, so that each batch is a dictionary of two."""

    def train_dataloader(self):
        return {"left": self.loader(), "right": self.loader()}

    def training_step(self, batch, batch_idx):
        (left,), (right,) = batch["left"], batch["right"]
        return super().training_step((torch.cat([left, right]),), batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.sizes.append(len(batch["left"][0]))


def test_several_loaders_are_tried_together(tmp_path):
    module = Several(600)
    trainer(tmp_path, largest(margin=0)).fit(module)
    assert 0.98 * 300 <= module.batch_size <= 300 and module.sizes == [module.batch_size] * 2


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"batch_size": 8})

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(3000, 20)), batch_size=self.hparams.batch_size)


def test_hparams_of_a_data_module_and_a_loader_passed_to_fit(tmp_path):
    module, data = PassedIn(600), Data()
    del module.batch_size
    trainer(tmp_path, largest(margin=0)).fit(module, data)
    assert 588 <= data.hparams.batch_size <= 600

    module, sampler = PassedIn(600), RandomSampler(range(2500))
    loader = DataLoader(TensorDataset(torch.randn(2500, 20)), batch_size=8, sampler=sampler, drop_last=True)
    run = trainer(tmp_path, largest(margin=0))
    run.fit(module, loader)
    used = run.train_dataloader
    assert 588 <= used.batch_size <= 600 and used.sampler is sampler and used.drop_last and loader.batch_size == 8
    assert module.sizes == [used.batch_size] * 2


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_evaluation_loops(tmp_path, fn):
    module = Walled(600)
    getattr(trainer(tmp_path, largest(margin=0), limit_val_batches=1.0), fn)(module)
    assert 588 <= module.batch_size <= 600 and module.sizes[0] == module.batch_size and sum(module.sizes) == 4000
    module = PassedIn(600)
    loader = DataLoader(TensorDataset(torch.randn(2500, 20)), batch_size=8)
    getattr(trainer(tmp_path, largest(margin=0), limit_val_batches=1.0), fn)(module, loader)
    assert 588 <= module.sizes[0] <= 600 and sum(module.sizes) == 2500


class Stateful(PassedIn):
    """Keeps all kinds of state that a step changes, and has room for 16 samples."""

    def __init__(self):
        super().__init__(16)
        self.dropout = nn.Dropout(0.3)
        self.steps, self.outputs, self.total = 0, [], torch.zeros(3)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.outputs.append(batch_idx)
        self.total += 1
        self.seen += len(batch[0])
        random.random(), np.random.rand()
        return super().training_step((self.dropout(batch[0]),), batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def state(self):
        """Return all that is kept, and what is drawn next."""
        (optimizer,), (schedule,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        moments = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [*self.state_dict().values(), *moments, self.total, torch.rand(3)]
        drawn = random.random(), np.random.rand(), [tensor.tolist() for tensor in tensors]
        plain = sorted(vars(self)), self.steps, self.outputs, self.losses, self.trainer.global_step
        return *drawn, *plain, schedule.scheduler.state_dict(), [one.training for one in self.modules()]


class Diary(pl.loggers.CSVLogger):
    """Remembers what it was told."""

    def __init__(self, folder):
        super().__init__(folder)
        self.told = []

    def log_metrics(self, metrics, step=None):
        self.told.append((step, dict(metrics)))


class Files(AutoBatchSize):
    """Looks for files that the search writes."""

    def scale_batch_size(self, run, module):
        before = sorted(Path(run.default_root_dir).rglob("*"))
        super().scale_batch_size(run, module)
        self.new = [path.name for path in sorted(Path(run.default_root_dir).rglob("*")) if path not in before]


def test_the_run_after_a_search_is_that_without_one_bit_for_bit(tmp_path):
    """A loader that shuffles with a generator of its own, so that its position counts."""
    seen = []
    for search in (True, False):
        folder = tmp_path / str(search)
        pl.seed_everything(7)
        module, diary = Stateful(), Diary(folder)
        loader = DataLoader(
            TensorDataset(torch.randn(300, 20)),
            batch_size=16,
            shuffle=True,
            generator=torch.Generator().manual_seed(9),
        )
        callback = Files("binsearch", init_val=4, margin=0, global_batch_size="largest")
        checkpoint = pl.callbacks.ModelCheckpoint(folder / "kept", every_n_train_steps=3, save_top_k=-1)
        run = trainer(
            folder,
            *([callback] if search else []),
            checkpoint,
            max_steps=30,
            logger=diary,
            log_every_n_steps=1,
            enable_checkpointing=True,
        )
        run.fit(module, loader)
        seen.append((module.state(), diary.told, sorted(path.name for path in (folder / "kept").iterdir())))
        if search:
            fits = [trial.fits for trial in callback.result.trials]
            assert True in fits and False in fits and callback.new == ["batch_size.json"]
    assert seen[0] == seen[1] and len(seen[0][1]) >= 30 and len(seen[0][2]) == 10


def test_a_global_batch_is_kept_and_learning_rates_scale(tmp_path):
    module = Walled(100)
    run = trainer(tmp_path, AutoBatchSize(global_batch_size=960), max_steps=2)
    run.fit(module)
    assert module.batch_size * run.accumulate_grad_batches == 960 and module.batch_size <= 100

    module = Walled(batch_size=64)
    callback = EffectiveBatchSize(256, lr_scaling="sqrt", reference_batch_size=64)
    run = trainer(tmp_path, callback)
    run.fit(module)
    assert (module.batch_size, run.accumulate_grad_batches, callback.plan.exact) == (64, 4, True)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.02)
    with pytest.warns(UserWarning, match=r"global batch of 127 is not possible here; the nearest is used: \d+"):
        module = Walled(batch_size=30)
        run = trainer(tmp_path, EffectiveBatchSize(127))
        warnings.simplefilter("always")
        run.fit(module)


class Kept(pl.Callback):
    """Looks whether the batch of the last step is still there."""

    def __init__(self):
        self.last, self.alive = None, 0

    def on_train_batch_start(self, run, module, batch, index):
        self.alive += self.last is not None and self.last() is not None
        self.last = weakref.ref(batch[0])


def test_a_guarded_step_keeps_nothing_alive(tmp_path):
    """A cycle would hold each batch until the collector runs: on a GPU, memory the next step needs."""
    kept = Kept()
    gc.disable()
    try:
        trainer(tmp_path, AutoBatchSize("off", on_oom="split"), kept, max_steps=6).fit(Walled())
    finally:
        gc.enable()
    assert kept.last is not None and kept.alive == 0
