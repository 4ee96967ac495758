"""A batch that does not fit in mid-run, on one process."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep import AutoBatchSize, BatchSizeError, RankFailedError
from tests.models.batch_size.models import FULL, Mid, Walled, trainer

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


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_if_single_samples_do_not_fit_either_the_error_says_so(tmp_path: Path, where: str) -> None:
    module = Mid(fits=0, where=where, only=(3,))
    with pytest.raises(BatchSizeError, match=r"rank 0 .* in batch 3 of epoch 0, and single samples do not fit"):
        trainer(tmp_path, AutoBatchSize("off", on_oom="split"), max_steps=6).fit(module)
