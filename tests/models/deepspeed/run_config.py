"""A small module, its data and a quiet Trainer, for fits under DeepSpeed in a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import LockstepDeepSpeedStrategy
from lightning_lockstep._lightning import LightningModule, Trainer
from tests.harness import QUIET

AUTO_LR = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}


class Net(LightningModule):
    """Its scheduler is chosen by what it is given."""

    def __init__(self, scheduler: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = self.made()
        self.scheduler = scheduler
        self.losses: list[float] = []

    def made(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.layers(batch[0].to(self.layers[0].weight.dtype))
        loss = torch.nn.functional.cross_entropy(outputs.float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    validation_step = test_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.02, betas=(0.8, 0.9))
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


def loader(batch_size: int = 8, samples: int = 64) -> DataLoader[Any]:
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size)


def trainer(strategy: Any, *, adapt: bool = True, **options: Any) -> Trainer:
    """A Trainer of two ranks; a configuration stands for the strategy that has it."""
    if isinstance(strategy, dict):
        strategy = LockstepDeepSpeedStrategy(config=strategy, adapt=adapt)
    given = {"strategy": strategy, "accelerator": "cpu", "devices": 2, "max_epochs": 1, **options}
    return Trainer(**{**QUIET, **given})


def config_of(runner: Trainer) -> dict[str, Any]:
    complete: Any = runner.strategy.config  # type: ignore[attr-defined]
    return complete  # type: ignore[no-any-return]
