"""The same training run on different set-ups: what the tests and the benchmark compare."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_lockstep.demo.images import ConvNet, DigitsData
from lightning_lockstep.distributed import current_communicator
from tests.models.batch_size.models import trainer

GLOBAL_BATCH, STEPS = 64, 20
#: (ranks, samples of a rank's micro-batch): with and without accumulation.
SETUPS = ((1, 64), (1, 16), (2, 32), (2, 8), (4, 16), (4, 8))


@dataclass(frozen=True)
class Variant:
    """How the demo's network is trained."""

    optimizer: str = "AdamW"
    precision: str = "32-true"
    pool: str = "max"

    def __str__(self) -> str:
        return f"{self.optimizer}, float{self.precision[:2]}, {self.pool} pooling"


class Recorded(ConvNet):
    """The demo's network; keeps the loss of every micro-batch."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(width=8)
        self.variant, self.curve = variant, list[float]()
        if variant.pool == "average":
            self.body[2] = nn.AvgPool2d(2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.curve.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        if self.variant.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return super().configure_optimizers()


def strategy_for(ranks: int, **options: Any) -> Any:
    """Ours on several ranks, none on one."""
    from lightning_lockstep import LockstepDDPStrategy

    return LockstepDDPStrategy(**options) if ranks > 1 else "auto"


def curve(ranks: int, micro_batch: int, variant: Variant, folder: str) -> list[float]:
    """Return the loss of every optimizer step: the mean over ranks and micro-batches."""
    from lightning_lockstep import LockstepDDPStrategy

    warnings.simplefilter("ignore")
    pl.seed_everything(1)
    module, accumulate = Recorded(variant), GLOBAL_BATCH // ranks // micro_batch
    run = trainer(
        folder,
        devices=ranks,
        strategy=LockstepDDPStrategy(),
        max_steps=STEPS,
        precision=variant.precision,
        accumulate_grad_batches=accumulate,
    )
    run.fit(module, DigitsData(global_batch_size=GLOBAL_BATCH))
    everyone = current_communicator().gather(module.curve)
    micro = [sum(values) / len(values) for values in zip(*everyone, strict=True)]
    return [sum(micro[i : i + accumulate]) / accumulate for i in range(0, len(micro), accumulate)]


def curves(ranks: int, micro_batch: int, variants: list[Variant], folder: str) -> list[list[float]]:
    """Return the curve of every variant, on the ranks of one process group."""
    return [curve(ranks, micro_batch, variant, folder) for variant in variants]


def largest_difference(one: list[float], other: list[float]) -> float:
    """Return by how much two curves of the same length differ at most."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
