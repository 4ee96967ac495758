"""A fit keeps its global batch and its optimizer steps, whatever fits; what is configured is restored afterwards."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_lockstep import AutoBatchSize, EffectiveBatchSize
from lightning_lockstep.demo.images import ConvNet, DigitsData
from tests.harness import run_ranks
from tests.models.batch_size.models import PassedIn, Walled, of_two

ROWS = 240


class Steps(pl.Callback):
    """Notes how a fit was divided, and its weights."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.size, self.accumulate = trainer.train_dataloader.batch_size, trainer.accumulate_grad_batches

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.steps = trainer.global_step
        self.weights = torch.cat([p.detach().flatten() for p in pl_module.parameters()]).tolist()


def without_norm(module: Walled) -> Walled:
    module.norm = nn.Identity()  # its statistics are those of the micro-batch
    return module


def trainer(folder: str, *callbacks: Any, **settings: Any) -> pl.Trainer:
    return of_two(folder, *callbacks, max_steps=-1, max_epochs=1, **settings)


#: Largest size that fits, batch size and accumulation as configured, those of the run.
DIVIDED = {
    "it fits": (1000, (12, 1), (12, 1)),
    "it does not": (7, (12, 1), (6, 2)),
    "a whole step fits": (1000, (3, 4), (12, 1)),
    "half a step fits": (7, (3, 4), (6, 2)),
    "more than the data": (1000, (1000, 1), None),
}


def kept(folder: str) -> dict[str, Any]:
    """Fits one after the other, on the same ranks."""
    told: dict[str, Any] = {}
    for name, (wall, (size, accumulate), _) in DIVIDED.items():
        weights = []
        for callbacks in ([AutoBatchSize()], []):
            pl.seed_everything(3, verbose=False)
            steps, room = Steps(), wall if callbacks else 10**9
            net = without_norm(Walled(room, batch_size=size, rows=ROWS, on_rank=1))
            run = trainer(folder, *callbacks, steps, accumulate_grad_batches=accumulate)
            run.fit(net)
            weights.append((steps.steps, steps.weights))
            if callbacks:
                divided = steps.size, steps.accumulate
                afterwards = net.batch_size, run.accumulate_grad_batches
        (found, searched), (expected, plain) = weights
        apart = max(abs(a - b) for a, b in zip(searched, plain, strict=True))
        told[name] = divided, afterwards, found == expected, apart

    # A loader that was passed, twice with one Trainer.
    net, steps = without_norm(PassedIn(7, batch_size=12, rows=ROWS, on_rank=1)), Steps()
    run = trainer(folder, AutoBatchSize(), steps)
    told["passed"] = []
    for _ in range(2):
        run.fit(net, net.loader())
        told["passed"].append((steps.size, steps.accumulate, run.accumulate_grad_batches))
    # A validation first, which takes what fits.
    net, finder = without_norm(Walled(100, batch_size=12, rows=ROWS)), AutoBatchSize()
    run = trainer(folder, finder, steps, limit_val_batches=1.0)
    run.validate(net, verbose=False)
    told["validated"] = [finder.optimal_batch_size, net.batch_size]
    run.fit(net)
    told["validated"] += [steps.size, net.batch_size]
    # Data with a global batch of their own, and one that EffectiveBatchSize keeps.
    data = DigitsData(global_batch_size=64)
    trainer(folder, AutoBatchSize(), steps, accumulate_grad_batches=2).fit(ConvNet(width=8), data)
    told["data"] = steps.size * steps.accumulate * 2, data.batch_size
    trainer(folder, AutoBatchSize(), EffectiveBatchSize(48), steps).fit(without_norm(Walled(10)))
    told["effective"] = steps.size, steps.size * steps.accumulate * 2
    return told


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, kept, str(tmp_path_factory.mktemp("kept")), backend=None, timeout=170)


@pytest.mark.parametrize("name", DIVIDED)
def test_steps_and_weights_are_those_without_a_search(found: list[dict[str, Any]], name: str) -> None:
    _, configured, expected = DIVIDED[name]
    for told in found:
        divided, afterwards, same_steps, apart = told[name]
        assert divided == (expected or (ROWS // 2, 1))
        assert afterwards == configured and same_steps and apart < 1e-5


def test_what_is_configured_is_there_again_after_each_fit_or_evaluation(found: list[dict[str, Any]]) -> None:
    for told in found:
        assert told["passed"] == [(6, 2, 1)] * 2
        assert 90 <= told["validated"][0] <= 100 and told["validated"][1:] == [12, 12, 12]


def test_a_global_batch_of_the_data_or_of_effective_batch_size_is_kept(found: list[dict[str, Any]]) -> None:
    for told in found:
        assert told["data"] == (64, 16)
        assert told["effective"] == (8, 48)
