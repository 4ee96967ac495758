"""A small classifier of digits, for fits on one CPU device and on a mesh of XLA devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep.strategies import LockstepXLASPMDStrategy
from tests.harness import QUIET

TRAINED, BATCH = 300, 64  # the last batch has 44 samples
# What float32 sums in another order may change in a loss of about 1.
CLOSE = 1e-5


class Classifier(L.LightningModule):
    """Two layers; notes its losses and the dtypes that it meets."""

    def __init__(self, dtype_of_scale: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 12))
        self.scale = torch.nn.Parameter(torch.ones(12, dtype=dtype_of_scale))
        self.losses: list[float] = []
        self.dtypes: dict[str, torch.dtype] = {}
        self.net[0].register_forward_hook(lambda module, args, out: self._note(input=args[0], hidden=out))

    def _note(self, **tensors: Tensor) -> None:
        self.dtypes |= {name: tensor.dtype for name, tensor in tensors.items()}

    def _step(self, batch: list[Tensor], stage: str) -> Tensor:
        rows, labels = batch
        logits = self.net(rows) * self.scale
        self._note(logits=logits)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        right = (logits.argmax(-1) == labels).double().mean()
        self.log(f"{stage}_loss", loss, on_step=stage == "train", on_epoch=True)
        self.log(f"{stage}_right", right, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self._step(batch, "train")
        self.losses.append(loss.detach())  # type: ignore[arg-type]
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._step(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._step(batch, "test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def loaders(batch: int = BATCH) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the training and the validation loader; the order is the same each time."""
    digits = load_digits()
    rows = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train = TensorDataset(rows[:TRAINED], labels[:TRAINED])
    held_out = TensorDataset(rows[TRAINED : TRAINED + 100], labels[TRAINED : TRAINED + 100])
    return DataLoader(train, batch), DataLoader(held_out, BATCH)


def trainer(folder: Path, strategy: Any = "auto", **options: Any) -> L.Trainer:
    """Return a Trainer for one CPU device, or for four of XLA where ``strategy`` is ours."""
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1 if strategy == "auto" else 4,
        "max_epochs": 2,
        **QUIET,
        "default_root_dir": folder,
    }
    return L.Trainer(strategy=strategy, **{**usual, **options})


def fitted(
    folder: Path,
    strategy: Any = "auto",
    *,
    module: Classifier | None = None,
    batch: int = BATCH,
    **options: Any,
) -> tuple[L.Trainer, Classifier]:
    """Fit the classifier from the same weights each time; its losses are numbers afterwards."""
    torch.manual_seed(1)
    net = module or Classifier()
    made = trainer(folder, strategy, **options)
    made.fit(net, *loaders(batch), ckpt_path=options.get("ckpt_path"))
    net.losses = [float(loss) for loss in net.losses]
    return made, net


def spmd(**options: Any) -> LockstepXLASPMDStrategy:
    """Return the strategy under test."""
    return LockstepXLASPMDStrategy(**options)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return logged metrics as numbers."""
    return {name: float(value) for name, value in metrics.items()}
