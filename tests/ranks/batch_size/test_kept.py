"""A fit keeps its global batch and its optimizer steps, whatever fits; what is configured is there again afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_lockstep import AutoBatchSize, BatchSizeError, EffectiveBatchSize, LockstepTuner
from lightning_lockstep.demo.images import ConvNet, DigitsData
from tests.common.batch_size.models import PassedIn, Walled, largest, trainer
from tests.common.batch_size.same_run import strategy_for
from tests.helpers import run_ranks, world_size

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.allow_leaks("env:POPULATE", "env"),
]

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


def on(ranks: int, folder: str, *callbacks: Any, **settings: Any) -> pl.Trainer:
    options = {"devices": ranks, "strategy": strategy_for(ranks), "max_steps": -1, "max_epochs": 1}
    return trainer(folder, *callbacks, **{**options, **settings})


#: Largest size that fits, batch size and accumulation as configured, those of the run.
DIVIDED = {
    "it fits": (1000, (12, 1), (12, 1)),
    "it does not": (7, (12, 1), (6, 2)),
    "a whole step fits": (1000, (3, 4), (12, 1)),
    "half a step fits": (7, (3, 4), (6, 2)),
    "more than the data": (1000, (1000, 1), None),
}


def kept(ranks: int, folder: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, (wall, (size, accumulate), _) in DIVIDED.items():
        weights = []
        for callbacks in ([AutoBatchSize("binsearch")], []):
            pl.seed_everything(3, verbose=False)
            steps, room = Steps(), wall if callbacks else 10**9
            net = without_norm(Walled(room, batch_size=size, rows=ROWS, on_rank=ranks - 1))
            run = on(ranks, folder, *callbacks, steps, accumulate_grad_batches=accumulate)
            run.fit(net)
            weights.append((steps.steps, steps.weights))
            if callbacks:
                divided = steps.size, steps.accumulate
                afterwards = net.batch_size, run.accumulate_grad_batches
        (found, searched), (expected, plain) = weights
        apart = max(abs(a - b) for a, b in zip(searched, plain, strict=True))
        told[name] = divided, afterwards, found == expected, apart

    # A loader that was passed, twice with one Trainer.
    net, steps = without_norm(PassedIn(7, batch_size=12, rows=ROWS, on_rank=ranks - 1)), Steps()
    run = on(ranks, folder, AutoBatchSize("binsearch"), steps)
    told["passed"] = []
    for _ in range(2):
        run.fit(net, net.loader())
        told["passed"].append((steps.size, steps.accumulate, run.accumulate_grad_batches))
    # A validation first, which takes what fits.
    net, finder = without_norm(Walled(100, batch_size=12, rows=ROWS)), AutoBatchSize("power")
    run = on(ranks, folder, finder, steps, limit_val_batches=1.0)
    run.validate(net, verbose=False)
    told["validated"] = [finder.optimal_batch_size, net.batch_size]
    run.fit(net)
    told["validated"] += [steps.size, net.batch_size]
    # Data with a global batch of their own, and one that EffectiveBatchSize keeps.
    data = DigitsData(global_batch_size=64, seed=5)
    on(ranks, folder, AutoBatchSize(), steps, accumulate_grad_batches=2).fit(ConvNet(width=8), data)
    told["data"] = steps.size * steps.accumulate * ranks, data.batch_size
    on(ranks, folder, AutoBatchSize("power"), EffectiveBatchSize(48), steps).fit(without_norm(Walled(10)))
    told["effective"] = steps.size, steps.size * steps.accumulate * ranks
    return told


@world_size(1, 2)
def test_steps_and_weights_are_those_without_a_search(world_size, tmp_path):
    for told in run_ranks(world_size, kept, world_size, str(tmp_path), backend=None, timeout=170):
        for name, (_, configured, expected) in DIVIDED.items():
            divided, afterwards, same_steps, apart = told[name]
            assert divided == (expected or (ROWS // world_size, 1)), name
            assert afterwards == configured and same_steps and apart < 1e-5, name
        assert told["passed"] == [(6, 2, 1)] * 2
        assert told["validated"] == [64, 12, 12, 12]
        assert told["data"] == (64, 64 // (2 * world_size))
        assert told["effective"] == (8, 48)


@pytest.mark.filterwarnings("default")
def test_the_largest_is_taken_where_it_is_asked_for_with_a_warning(tmp_path):
    import warnings

    said = (
        r"batch size 64 per rank instead of 4: an epoch has 4 optimizer steps instead of 60, .*size=4\) keeps"
    )
    for search in ("callback", "tuner"):
        net, run = (
            Walled(100, rows=ROWS),
            trainer(tmp_path, *([largest("power")] if search == "callback" else [])),
        )
        warnings.simplefilter("always")
        with pytest.warns(UserWarning, match=said):
            if search == "tuner":
                LockstepTuner(run).scale_batch_size(net, mode="power")
            else:
                run.fit(net)
        assert net.batch_size == 64, search
    with pytest.raises(BatchSizeError, match=r"'largest'.* ask for global batches of 16 and largest"):
        trainer(tmp_path, largest(), EffectiveBatchSize(16)).fit(Walled())


class ByHand(Walled):
    def __init__(self, wall: int) -> None:
        super().__init__(wall, batch_size=12)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()


def test_manual_optimization_keeps_a_batch_that_fits_and_says_what_to_write_for_one_that_does_not(tmp_path):
    callback, net = AutoBatchSize("binsearch"), ByHand(20)
    trainer(tmp_path, callback).fit(net)
    assert callback.optimal_batch_size == 12 and net.sizes == [12, 12]
    with pytest.raises(BatchSizeError, match=r"manual optimization.*12 per rank are configured.*'largest'"):
        trainer(tmp_path, AutoBatchSize("binsearch")).fit(ByHand(10))
    net = ByHand(10)
    trainer(tmp_path, largest("power")).fit(net)
    assert net.sizes == [8, 8]


def test_reports_are_in_the_folder_of_the_run_or_nowhere(tmp_path, monkeypatch, capfd):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for logger in (False, pl.loggers.CSVLogger("logs")):
        run = trainer(tmp_path / "here", AutoBatchSize("power"), logger=logger, limit_val_batches=1.0)
        run.validate(Walled(100), verbose=False)
        run.fit(Walled())
        written = sorted(str(path) for path in Path().rglob("batch_size*"))
        names = ["batch_size.json", "batch_size_validate.json"]
        assert written == [f"logs/lightning_logs/version_0/{name}" for name in names if logger]
    assert json.loads(Path(written[0]).read_text())["accumulate"] == 1
    said = capfd.readouterr().err
    assert (
        "4 fits and nothing larger is tried: it is a rank's share of the global batch of 4, as config" in said
    )
    assert "batch size 64 per rank\n" in said, "an evaluation has no optimizer steps"
