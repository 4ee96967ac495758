"""What a checkpoint holds of this package: no path of a module, so that it loads however files are moved."""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

from lightning.pytorch import Trainer

import lightning_lockstep
from lightning_lockstep.demo import ConvNet, DigitsData
from tests.harness import QUIET, run_ranks


def fit_and_save(path: str) -> int:
    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        callbacks=[lightning_lockstep.SyncedEarlyStopping("train_loss"), lightning_lockstep.StopTogether()],
        **QUIET,
        limit_val_batches=0,
    )
    trainer.fit(ConvNet(width=8), DigitsData())
    trainer.save_checkpoint(path)
    return int(ConvNet.load_from_checkpoint(path, weights_only=True).hparams["width"])


def test_a_checkpoint_names_no_module_of_the_package(tmp_path: Path) -> None:
    """So it loads however files are moved, and whatever release wrote it."""
    path = tmp_path / "last.ckpt"
    assert run_ranks(1, fit_and_save, str(path), backend=None) == [8]
    with zipfile.ZipFile(path) as file:
        (data,) = [name for name in file.namelist() if name.endswith("data.pkl")]
        texts = [str(text) for _, text, _ in pickletools.genops(file.read(data))]
    assert any("EarlyStopping" in text for text in texts)
    assert [text for text in texts if "lightning_lockstep" in text] == []
