"""What a step logs when its batch is split, by every argument of ``self.log``: as if it had not been."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from tests.common.batch_size.models import FULL, Walled, _FailsInBackward, trainer
from tests.common.batch_size.same_run import strategy_for
from tests.helpers import run_ranks, world_size


class Logs(Walled):
    """Logs in every way; two batches run out of memory on one rank before that, in the midst of it or after."""

    def __init__(self, where: str) -> None:
        super().__init__(where=where, batch_size=8, rows=64)
        self.norm = self.middle = nn.Identity()
        self.mean, self.sum = MeanMetric(), SumMetric()
        self.several = MetricCollection([MeanAbsoluteError(), MeanSquaredError()])

    def full_here(self, inputs: torch.Tensor, where: str) -> bool:
        here = self.trainer.global_rank == self.trainer.world_size - 1
        return here and self.where == where and len(inputs) > 4 and self.trainer.fit_loop.batch_idx in (1, 3)

    def run_out(self, inputs: torch.Tensor, where: str) -> None:
        if self.full_here(inputs, where):
            raise RuntimeError(FULL)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        self.run_out(inputs, "before")
        outputs, targets = self.last(torch.relu(self.first(inputs)))[:, 0], inputs.sum(1)
        loss = (outputs - targets).square().mean()
        both, size = {"on_step": True, "on_epoch": True}, len(inputs)
        self.log("plain", loss)
        self.log("positional", loss, True, False, True, True)
        self.log("none", loss, batch_size=None, **both)
        self.log("number", loss, batch_size=size, **both)
        self.log("always", loss, batch_size=8, **both)
        self.log("synced", loss, sync_dist=True, **both)
        self.log("graph", loss, enable_graph=True, **both)
        self.log("count", (outputs > 0).sum(), reduce_fx="sum", **both)
        self.mean(outputs.detach())
        self.log("mean", self.mean, **both)
        self.run_out(inputs, "midst")
        self.log("largest", outputs.max(), reduce_fx=torch.max, **both)
        self.log("smallest", outputs.min(), reduce_fx="min", sync_dist=True, **both)
        self.log("index", loss, add_dataloader_idx=False, prog_bar=True, **both)
        if self.trainer.is_global_zero:
            self.log("zero", loss, rank_zero_only=True, **both)
        self.log_dict({"a": loss, "b": 2.0})
        self.log_dict({"c": loss}, sync_dist=True, **both)
        self.sum.update(outputs.detach())
        self.log("sum", self.sum, on_step=False, on_epoch=True)
        now = self.several(outputs.detach(), targets)
        self.log_dict({f"now_{name}": value for name, value in now.items()})
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return _FailsInBackward.apply(loss, self.full_here(inputs, "after"))

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        self.steps: list[dict[str, float]] = []
        return torch.optim.SGD(self.parameters(), lr=0.01)


def logged(ranks: int, folder: str) -> dict[str, Any]:
    from lightning_lockstep import AutoBatchSize

    warnings.simplefilter("ignore")
    told = {}
    for where in ("", "before", "midst", "after"):
        pl.seed_everything(3, verbose=False)
        module, callback = Logs(where), AutoBatchSize("off", on_oom="split")
        options = {"devices": ranks, "strategy": strategy_for(ranks), "max_steps": -1, "max_epochs": 1}
        run = trainer(folder, callback, **options)
        run.fit(module)
        told[where] = [*module.steps, {name: float(value) for name, value in run.callback_metrics.items()}]
        told[f"{where}, split"] = callback.batches_split
    return told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.allow_leaks("env:POPULATE", "env")
@world_size(1, 2)
def test_every_argument_of_log_is_kept(world_size, tmp_path):
    for told in run_ranks(world_size, logged, world_size, str(tmp_path), backend=None, timeout=120):
        assert len(told[""]) > 3 and len(told[""][-1]) >= 30
        for where in ("before", "midst", "after"):
            assert told[f"{where}, split"] >= 2, where
            for batch, (given, right) in enumerate(zip(told[where], told[""], strict=True)):
                assert given.keys() == right.keys(), (where, batch)
                for name, value in right.items():
                    assert given[name] == pytest.approx(value, rel=1e-4), (where, batch, name)
