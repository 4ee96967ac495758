"""Small models that go wrong in one chosen way when a batch holds the value MARK."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.harness import QUIET, on_device

WIDTH, MARK = 8, 100.0


class Explode(nn.Module):
    """Multiplies marked values until they are infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > MARK / 2, x * 1e38, x)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.marked = bool((x > MARK / 2).any())
        return x.clamp(max=5.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf") if ctx.marked else gradient


class BadBackward(nn.Module):
    """A good forward whose backward is infinite for marked values."""

    def forward(self, x: Tensor) -> Tensor:
        return _Backward.apply(x)


class Task(LightningModule):
    """A stack of ``before``, the suspect and a head; the loss is the mean square of the output."""

    def __init__(self, suspect: nn.Module | None = None, *, lr: float = 0.01, metric: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.before.weight.copy_(torch.eye(WIDTH) + 0.01 * torch.randn(WIDTH, WIDTH))
        self.suspect = suspect or nn.Identity()
        self.head = nn.Linear(WIDTH, 1)
        self.metric_head = Explode() if metric else None
        self.lr = lr
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.suspect(self.before(x))
        if isinstance(out, dict):
            out = out["states"][1]["last"] + out["first"]
        return self.head(out)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.metric_head is not None:
            self.metric_head(batch)
            batch = batch.clamp(max=1.0)
        loss = self(batch).square().mean()
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class MaskedSoftmax(Task):
    """Softmax of a mask whose infinities are meant, from batch 1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = Mask()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.before(batch)
        if batch_idx == 1:
            x = torch.softmax(x + self.mask(x), -1)
        return self.head(x).mean() * 0.1 + 4.2


class Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).masked_fill(torch.arange(WIDTH, device=x.device) > 5, float("-inf"))


class Checkpointed(nn.Module):
    """Runs what it holds under activation checkpointing."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class TwoOptimizers(Task):
    """Manual optimisation: the head steps first, then the rest; the second forward explodes."""

    def __init__(self, suspect: nn.Module) -> None:
        super().__init__(suspect)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        with first.toggle_model():
            first.zero_grad()
            self.manual_backward(self.head(torch.nn.functional.dropout(batch.clamp(max=1.0), 0.3)).square().mean())
            first.step()
        with second.toggle_model():
            second.zero_grad()
            loss = self(batch).square().mean()
            self.losses.append(float(loss.detach()))
            self.manual_backward(loss)
            second.step()

    def configure_optimizers(self) -> Any:
        rest = [*self.before.parameters(), *self.suspect.parameters()]
        return torch.optim.SGD(self.head.parameters(), 0.01), torch.optim.SGD(rest, 0.01)


def data(*, batches: int, marked: dict[int, int] | None = None, seed: int = 0, size: int = 4) -> DataLoader[Tensor]:
    """Return random batches; ``marked`` says by batch which row gets the mark."""
    rows = torch.randn(batches * size, WIDTH, generator=torch.Generator().manual_seed(seed))
    for batch, row in (marked or {}).items():
        rows[batch * size + row, 3] = MARK
    return DataLoader(rows, batch_size=size)


def fit(model: LightningModule, loader: Any, *callbacks: Callback, **options: Any) -> Trainer:
    """Fit one epoch quietly and return the Trainer."""
    arguments: dict[str, Any] = {
        **on_device(options.pop("devices", 1)),
        "max_epochs": 1,
        **QUIET,
        "use_distributed_sampler": False,
        "callbacks": list(callbacks),
    }
    trainer = Trainer(**{**arguments, **options})
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*MPS|.*`isinstance.treespec, LeafSpec.`.*")
        trainer.fit(model, loader)
    return trainer
