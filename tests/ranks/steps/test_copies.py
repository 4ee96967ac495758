"""What this package hangs on a module does not go into copies of it, nor keep it from being copied and pickled."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_lockstep.callbacks as ours
from lightning_lockstep import LockstepDDPStrategy, LockstepDeepSpeedStrategy
from lightning_lockstep.deepspeed.checkpoints.consolidation import consolidate
from tests.harness import run_ranks
from tests.models.batch_size.models import FULL, trainer

pytestmark = pytest.mark.filterwarnings("ignore")


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
}
HOOKS = ("training_step", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")


class Copied(pl.LightningModule):
    """Copies itself and its network in every hook; the copies are used, on values that are not finite too."""

    def __init__(self, net: nn.Module, *, full: bool = False, as_ever: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net, self.full, self.as_ever = net, full, as_ever
        self.batch_size, self.copies, self.steps = 4, 0, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        if self._trainer is not None:
            self.copy_all()
            if self.full and len(batch[0]) > 2:
                raise RuntimeError(FULL)
            self.log("loss", 1.0 / (1 + batch_idx))
        return self.net(batch[0]).square().mean()

    def copy_all(self) -> None:
        if self.steps < 2:
            return  # what is put in place during the first step is copied in the second
        x, steps = torch.ones(2, 4), self.steps
        for original in (self, self.net):
            if self.as_ever:  # so that it can be loaded where this package is not installed
                assert b"lightning_lockstep" not in pickle.dumps(original)
            for way in WAYS.values():
                made = way(original)
                assert made is not original
                net = made.net if isinstance(made, Copied) else made
                with torch.no_grad():
                    assert torch.equal(net(x), self.net(x))
                    assert net(x * float("nan")).isnan().all()
                    for parameter in net.parameters():
                        parameter.fill_(float("nan"))
                if isinstance(made, Copied):
                    made._trainer = None
                    made.training_step([x], 0)
                    assert (made.steps, self.steps) == (steps + 1, steps)
                    assert made.log.__func__ is pl.LightningModule.log and made.log.__self__ is made
        self.copies += 1

    def on_after_backward(self) -> None:
        self.copy_all()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.copy_all()

    def on_train_batch_end(self, *args: Any) -> None:
        self.copy_all()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=self.batch_size)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()


#: Of each callback that acts in a fit; those of Lightning copy the module themselves.
CALLBACKS: dict[str, Callable[[], Any]] = {
    "AutoBatchSize": lambda: ours.AutoBatchSize(max_trials=1, init_val=4, max_val=4),
    "FP32Modules": lambda: ours.FP32Modules(["net.0", "net.1"]),
    "AutoBatchSize, split": lambda: ours.AutoBatchSize("off", on_oom="split"),
    "SyncedEarlyStopping": lambda: ours.SyncedEarlyStopping("loss", check_on_train_epoch_end=True),
    "EffectiveBatchSize": lambda: ours.EffectiveBatchSize(4),
    "OverflowDetector": lambda: ours.OverflowDetector(mode="hooks"),
    "RankOrderedLogging": lambda: ours.RankOrderedLogging(),
    "ReplicaCheck": lambda: ours.ReplicaCheck(every_n_steps=1),
    "StaticShapes": lambda: ours.StaticShapes(),
    "StopTogether": lambda: ours.StopTogether(),
    "StragglerMonitor": lambda: ours.StragglerMonitor(),
    "EMAWeightAveraging": EMAWeightAveraging,
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=1),
}


class Holder(pl.LightningModule):
    """Has its network among the hyperparameters, as templates do, and one that it does not train."""

    def __init__(self, net: nn.Module, rate: float, idle: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters({"net": {"inner": net}, "rate": rate, "idle": nn.Linear(2, 2)})
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])

    train_dataloader = Copied.train_dataloader
    batch_size = 4


def fit(folder: str, *names: str) -> tuple[int, bool, bool]:
    """Fit with callbacks, whose module copies itself in every hook; return how often, and what a checkpoint has."""
    warnings.simplefilter("ignore")
    is_wide = "FP32Modules" in names  # then copies compute in float32 too
    module = Copied(network(), full="AutoBatchSize, split" in names, as_ever=not is_wide)
    checkpoint = ModelCheckpoint(f"{folder}/{names[-1]}", save_last=True)
    run = trainer(
        folder,
        *(CALLBACKS[name]() for name in names),
        checkpoint,
        strategy=LockstepDDPStrategy(),
        max_steps=2,
        precision="bf16-mixed" if is_wide else "32-true",
        enable_checkpointing=True,
    )
    run.fit(module)
    path = checkpoint.last_model_path
    loaded = Copied.load_from_checkpoint(path, weights_only=False)
    pairs = zip(loaded.net.parameters(), module.net.parameters(), strict=True)
    has_net = bool(torch.load(path, weights_only=False)["hyper_parameters"]["net"])
    return module.copies, has_net, all(torch.equal(parameter, own) for parameter, own in pairs)


def fits(folder: str) -> list[tuple[int, bool, bool]]:
    search, wide, *others, ema, swa = CALLBACKS
    fits_of_ours = [fit(folder, search), fit(folder, wide), fit(folder, *others)]
    return [*fits_of_ours, fit(folder, "OverflowDetector", ema), fit(folder, "OverflowDetector", swa)]


def test_a_module_is_copied_and_pickled_during_training(tmp_path: Path) -> None:
    (found,) = run_ranks(1, fits, str(tmp_path), backend=None, timeout=120)
    assert min(copies for copies, *_ in found) >= len(HOOKS)
    assert all(has_net for _, has_net, _ in found), "the network is among the hyperparameters"
    assert all(equal for *_, equal in found[:3]), "the others have averages of the weights"


def fits_under_deepspeed(folder: str) -> list[Any]:
    warnings.simplefilter("ignore")
    answers = []
    for stage in (2, 3):
        module = Holder(network(), rate=0.01)
        checkpoint = ModelCheckpoint(f"{folder}/{stage}", save_last=True, every_n_train_steps=1)
        run = trainer(
            folder,
            checkpoint,
            strategy=LockstepDeepSpeedStrategy(stage=stage),
            max_steps=2,
            enable_checkpointing=True,
        )
        run.fit(module)
        file = f"{folder}/{stage}.ckpt"
        consolidate(f"{folder}/{stage}/last.ckpt", file)
        content = torch.load(file, weights_only=False)
        (states,) = Path(f"{folder}/{stage}/last.ckpt").rglob("*model_states.pt")
        written = torch.load(states, weights_only=False)
        loaded = Holder.load_from_checkpoint(file, net=network(), weights_only=False)
        weights = next(loaded.net.parameters())
        answers.append(
            (
                sorted(written["hyper_parameters"]),
                torch.equal(weights, content["state_dict"]["net.0.weight"]),
                sorted(module.hparams),
            )
        )
    return answers


def test_a_checkpoint_of_deepspeed_leaves_out_what_it_trains(tmp_path: Any) -> None:
    for answers in run_ranks(1, fits_under_deepspeed, str(tmp_path), backend=None, timeout=170):
        assert answers == [(["idle", "rate"], True, ["idle", "net", "rate"])] * 2
