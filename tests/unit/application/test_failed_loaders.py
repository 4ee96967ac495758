"""A program whose data loader hook raises leaves nothing of Lightning's in torch's classes for the next job."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import BatchSampler, DataLoader

from lightning_lockstep._trainer import restore_data_classes

CLASSES = (DataLoader, BatchSampler)
OWN = {
    (cls, name): getattr(cls, name) for cls in CLASSES for name in ("__init__", "__setattr__", "__delattr__")
}
ROWS = torch.ones(8, 32)


class NoData(BoringModel):
    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        raise FileNotFoundError("no data here")


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec")
def test_the_next_run_in_the_process_makes_loaders_as_torch_does(tmp_path: Path) -> None:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, **options)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            trainer.fit(NoData())
    with pytest.raises(Exception, match="more than one"):
        trainer.predict(NoData(), DataLoader(ROWS, 4))
    restore_data_classes()
    assert {(cls, name): getattr(cls, name) for cls, name in OWN} == OWN
    assert not [name for cls in CLASSES for name in vars(cls) if name.startswith("__old")]
    assert len(trainer.predict(NoData(), DataLoader(ROWS, 4)) or ()) == 2
