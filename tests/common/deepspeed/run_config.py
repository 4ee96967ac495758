"""A small module and a Trainer with a configuration of DeepSpeed, for fits in a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import LockstepDeepSpeedStrategy
from lightning_lockstep._lightning import LightningModule, Trainer

AUTO_LR = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}


class Net(LightningModule):
    """Its optimizer and scheduler are chosen by what it is given."""

    def __init__(self, scheduler: str = "", lr: float = 0.02) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = self.made()
        self.scheduler, self.lr = scheduler, lr

    def made(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]).float(), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    validation_step = test_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, betas=(0.8, 0.9))
        if not self.scheduler:
            return optimizer
        return [optimizer], [getattr(torch.optim.lr_scheduler, self.scheduler)(optimizer, 1)]


class MadeLater(Net):
    """Has its layers only after configure_model."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = self.made()


def loader(batch_size: int = 8) -> DataLoader[Any]:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size)


def trainer(config: dict[str, Any], **options: Any) -> Trainer:
    return Trainer(
        strategy=LockstepDeepSpeedStrategy(config=config, adapt=True),
        accelerator="cpu",
        devices=options.pop("devices", 2),
        max_epochs=options.pop("max_epochs", 1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def config_of(runner: Trainer) -> dict[str, Any]:
    complete: Any = runner.strategy.config  # type: ignore[attr-defined]
    return complete  # type: ignore[no-any-return]
