"""Gradients kept apart from a run, and DDP's reducer, which must not notice a step beside it."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import AutoBatchSize, LockstepDDPStrategy, OverflowDetector
from tests.harness import run_ranks
from tests.models.batch_size.models import FULL, trainer

# What runs the module beside DDP, times what DDP remembers between steps.


class Nan(nn.Module):
    def forward(self, x):
        return x * float("nan")


class Branches(pl.LightningModule):
    """Every ``turns`` batches the other of two branches is used, or always both (0)."""

    # ``event`` happens in batch 2 of rank 1.

    def __init__(self, event: str, *, turns: int, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
        self.bad = Nan()
        self.event, self.turns, self.rows, self.batch_size = event, turns, rows, 4

    def training_step(self, batch, batch_idx):
        x = batch[0]
        happens = batch_idx == 2 and self.global_rank == 1
        if happens and self.event == "full" and len(x) > 2:
            raise RuntimeError(FULL)
        if happens and self.event == "nan":
            x = self.bad(x)
        if happens and self.event == "nan beside":
            self.bad(x.detach())
        nets = (self.a, self.b)
        chosen = [nets[batch_idx // self.turns % 2]] if self.turns else nets
        return sum(net(x).square().mean() for net in chosen)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if self.event != "nan" or self.detected:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        optimizer_closure()  # what the detector does in the run that is compared
        if all(p.grad is None or p.grad.isfinite().all() for p in self.parameters()):
            optimizer.step(lambda: None)

    @property
    def detected(self) -> bool:
        return any(isinstance(c, OverflowDetector) for c in self.trainer.callbacks)

    def configure_optimizers(self):
        # A gradient of zero is not the same as none.
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=0.1)

    def train_dataloader(self):
        data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1 + self.global_rank))
        rows = self.rows - (12 if self.rows < 64 else 0) * self.global_rank
        return DataLoader(TensorDataset(data[:rows]), batch_size=self.batch_size)


#: What runs the module beside DDP: the callback, and what happens to the run.
BESIDE: dict[str, tuple[Any, str]] = {
    "trial": (lambda: AutoBatchSize(max_trials=2, init_val=4, max_val=4), ""),
    "replay on one rank": (lambda: OverflowDetector(mode="hooks", action="warn"), "nan beside"),
    "skip": (lambda: OverflowDetector(action="skip"), "nan"),
    "split": (lambda: AutoBatchSize("off", on_oom="split"), "full"),
    "lr finder": (lambda: LearningRateFinder(num_training_steps=5, update_attr=False), ""),
}
UNUSED: dict[str, Any] = {"find_unused_parameters": True}
#: What DDP remembers: its options, those of the Trainer and of the module.
REMEMBERED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "unused, views": (UNUSED, {}, {"turns": 1}),
    "unused, no_sync": (UNUSED, {"accumulate_grad_batches": 2}, {"turns": 2}),
    "unused, join": (
        {**UNUSED, "uneven_inputs": "join"},
        {"use_distributed_sampler": False},
        {"turns": 1, "rows": 40},
    ),
    "static graph": ({"static_graph": True}, {}, {}),
}


def fit(beside: str, remembered: str, folder: str, event: str) -> list[float]:
    """Return the weights of this rank after a fit (``beside`` is "" if nothing runs the module beside it)."""
    ddp, settings, kind = REMEMBERED[remembered]
    callbacks = [BESIDE[beside][0]()] if beside else []
    module = Branches(event, **{"turns": 0, "rows": 64, **kind})
    trainer(
        folder,
        *callbacks,
        devices=2,
        strategy=LockstepDDPStrategy(**ddp),
        max_steps=-1,
        max_epochs=1,
        **{"limit_train_batches": 10, **settings},
    ).fit(module)
    if beside in ("skip", "replay on one rank") and module.global_rank:
        assert callbacks[0].reports, "nothing was replayed"
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def fits(folder: str) -> dict[tuple[str, str], list[float]]:
    warnings.simplefilter("ignore")
    found = {}
    for name, (ddp, _, _) in REMEMBERED.items():
        found[name, ""] = fit("", name, folder, "")
        found[name, "nan"] = fit("", name, folder, "nan")
        for beside, (_, event) in BESIDE.items():
            if beside == "split" and ("static_graph" in ddp or "uneven_inputs" in ddp):
                continue
            if beside == "lr finder" and "uneven_inputs" in ddp:
                continue
            found[name, beside] = fit(beside, name, folder, event)
    return found


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Any:
    first, second = run_ranks(2, fits, str(tmp_path_factory.mktemp("fits")), backend=None, timeout=170)
    assert first == second
    return first


@pytest.mark.parametrize("beside", BESIDE)
def test_ddp_does_not_notice_a_step_beside_it(beside, weights):
    names = [name for name, other in weights if other == beside]
    assert len(names) >= 2
    for name in names:
        reference = weights[name, "nan" if BESIDE[beside][1] == "nan" else ""]
        # Of parts of a batch sums are rounded differently.
        error = 1e-6 if beside == "split" else 0
        assert weights[name, beside] == pytest.approx(reference, rel=0, abs=error), name
