"""The same run on 1, 2 and 4 ranks, with and without accumulation: how far the loss curves are apart."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from benchmarks.engine import Report, Table
from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.demo.images import ConvNet, DigitsData
from lightning_lockstep.distributed import current_communicator
from tests.harness import run_ranks
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


def curve(ranks: int, micro_batch: int, variant: Variant, folder: str) -> list[float]:
    """Return the loss of every optimizer step: the mean over ranks and micro-batches."""
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


VARIANTS = [
    Variant("SGD"),
    Variant("AdamW"),
    Variant("AdamW", pool="average"),
    Variant("SGD", "64-true"),
    Variant("AdamW", "64-true"),
]


def run(quick: bool) -> Report:
    variants, setups = (VARIANTS[:1], SETUPS[:3]) if quick else (VARIANTS, SETUPS)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks, micro_batch in setups:
            print(f"{ranks} rank(s), micro-batch {micro_batch}", flush=True)
            arguments = (ranks, micro_batch, variants, folder)
            found[ranks, micro_batch] = run_ranks(ranks, curves, *arguments, backend=None, timeout=240)[0]
    return Report(
        title="The same run on any set-up",
        tables=[_table(index, variant, found) for index, variant in enumerate(variants)],
        notes=[
            f"The demo's network (width 8) on the digits, seed 1, {STEPS} steps, global batch {GLOBAL_BATCH}, one"
            " thread a rank. The loss of a step is the mean over ranks and micro-batches; AdamW's learning rate"
            " is 0.003, SGD's 0.05 with momentum 0.9. Not a measurement of time.",
        ],
    )


def _table(index: int, variant: Variant, found: dict[tuple[int, int], list[list[float]]]) -> Table:
    reference = next(iter(found.values()))[index]
    rows = []
    for (ranks, micro_batch), all_curves in found.items():
        values = all_curves[index]
        shown = [f"{values[step]:.6f}" for step in (0, STEPS // 2 - 1, STEPS - 1)]
        apart = f"{largest_difference(values, reference):.1e}"
        rows.append([str(ranks), str(micro_batch), str(GLOBAL_BATCH // ranks // micro_batch), *shown, apart])
    columns = ["ranks", "micro-batch", "accumulated", "loss at step 1", "10", "20", "largest difference"]
    return Table(str(variant), columns, rows)
