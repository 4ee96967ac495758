"""A batch that does not fit in mid-run, on one process."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lockstep import AutoBatchSize, RankFailedError
from tests.common.batch_size.models import FULL, Walled, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.allow_leaks("env:POPULATE", "env"),
]


class Told(Walled):
    """Hears in its step that another rank has failed."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            raise RankFailedError(f"rank 1 failed: RuntimeError: {FULL}")
        return super().training_step(batch, batch_idx)


def test_what_ran_out_on_another_rank_is_not_recovered_from_here(tmp_path: Path) -> None:
    callback = AutoBatchSize("off", on_oom="split")
    module = Told()
    held = weakref.ref(module)
    with pytest.raises(RankFailedError):
        trainer(tmp_path, callback).fit(module)
    assert callback.batches_split == 0
    del module, callback
    gc.collect()
    assert held() is None, "its memory would be missing in the next fit"


class Thawed(Walled):
    """Trains its last layer from the start of training on, which is after the start of the fit."""

    def setup(self, stage: str) -> None:
        self.last.requires_grad_(False)

    def on_train_start(self) -> None:
        self.last.requires_grad_(True)


def test_what_is_trained_is_known_in_the_midst_of_a_resumed_epoch_too(tmp_path: Path) -> None:
    saved = str(tmp_path / "middle.ckpt")
    first = trainer(tmp_path, max_steps=2)
    first.fit(Thawed())
    first.save_checkpoint(saved)
    module = Thawed(2, only=(2,))
    seen = []
    module.last.weight.register_hook(lambda gradient: seen.append(module.trainer.global_step))
    callback = AutoBatchSize("off", on_oom="split")
    trainer(tmp_path, callback, max_steps=4).fit(module, ckpt_path=saved)
    assert callback.batches_split == 1
    assert sorted(set(seen)) == [2, 3]


class Growing(pl.LightningModule):
    """Sequences grow by the step; more than ``wall`` values at once run out of memory."""

    def __init__(self, wall: int) -> None:
        super().__init__()
        self.layer, self.wall, self.largest = nn.Linear(4, 4), wall, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch.numel() > self.wall:
            raise MemoryError
        self.largest = max(self.largest, batch.numel())
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_a_run_whose_sequences_grow_survives(tmp_path: Path) -> None:
    data = [torch.randn(1 + index // 8, 4) for index in range(8 * 14)]
    module, callback = Growing(400), AutoBatchSize("off", on_oom="split")
    run = trainer(tmp_path, callback, max_steps=-1, max_epochs=1)
    run.fit(module, DataLoader(data, batch_size=8))
    assert run.global_step == 14 and callback.batches_split == 2 and module.largest <= 400
