"""A module that has every hook of a training step, and notes which were called."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FULL = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes"


class Hooked(pl.LightningModule):
    """Overrides every hook of a step; runs out of memory in ``where`` above ``most`` samples."""

    def __init__(self, most: int = 10**9, *, where: str = "", manual: bool = False, rows: int = 4000) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.most, self.where, self.rows, self.batch_size = most, where, rows, 4
        self.automatic_optimization = not manual
        self.calls: list[str] = []
        self.samples = 0

    def called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.where and self.samples > self.most:
            raise RuntimeError(FULL)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (inputs,) = batch
        self.samples = len(inputs)
        self.called("training_step")
        loss = (self.last(torch.relu(self.first(inputs))) - 1).pow(2).mean()
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            with optimizer.toggle_model(sync_grad=False):
                optimizer.zero_grad()
                part = (self.last(torch.relu(self.first(inputs))) - 1).pow(2).mean()
                self.manual_backward(part)
                optimizer.step()
        return loss.detach()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.called("backward")
        super().backward(loss, *args, **kwargs)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.called("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.called("on_before_backward")

    def on_after_backward(self) -> None:
        self.called("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.called("on_before_optimizer_step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.called("configure_gradient_clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.called("optimizer_step")

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.first, self.last)]

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(self.rows, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=self.batch_size)


AUTOMATIC = [
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
]
