"""What this package hangs on a module does not go into copies of it, nor keep it from being copied and pickled."""

from __future__ import annotations

import copy
import io
import pickle
import traceback
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


CALLBACKS: dict[str, Callable[[], Any]] = {
    "AutoBatchSize": lambda: ours.AutoBatchSize(max_trials=1, init_val=4, max_val=4),
    "AutoBatchSize, split": lambda: ours.AutoBatchSize("off", on_oom="split"),
    "SyncedEarlyStopping": lambda: ours.SyncedEarlyStopping("loss", check_on_train_epoch_end=True),
    "EffectiveBatchSize": lambda: ours.EffectiveBatchSize(8),
    "FP32Modules": lambda: ours.FP32Modules(["net.0", "net.1"]),
    "OverflowDetector": lambda: ours.OverflowDetector(),
    "OverflowDetector, hooks": lambda: ours.OverflowDetector(mode="hooks"),
    "OverflowDetector, trace": lambda: ours.OverflowDetector(trace_batch_nums=[1]),
    "RankOrderedLogging": lambda: ours.RankOrderedLogging(),
    "ReplicaCheck": lambda: ours.ReplicaCheck(every_n_steps=1),
    "StaticShapes": lambda: ours.StaticShapes(),
    "StopTogether": lambda: ours.StopTogether(),
    "StragglerMonitor": lambda: ours.StragglerMonitor(),
}

#: What copies the module itself, beside what of ours hangs most on it.
OF_LIGHTNING: dict[str, Callable[[], Any]] = {
    "EMAWeightAveraging": lambda: [ours.OverflowDetector(mode="hooks"), EMAWeightAveraging()],
    "StochasticWeightAveraging": lambda: [
        ours.OverflowDetector(mode="hooks"),
        StochasticWeightAveraging(1e-3, swa_epoch_start=1),
    ],
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


def test_no_callback_is_left_out() -> None:
    # The one that is acts after a fit under DeepSpeed.
    assert {name.partition(",")[0] for name in CALLBACKS} | {"ConsolidateCheckpoints"} == set(ours.__all__)


def fit(folder: str, name: str) -> str:
    """Fit with a callback, whose module copies itself in every hook; returns what went wrong."""
    # In float32 modules copies compute so too; a traced step has its recorder's hooks.
    plain = not name.endswith(("FP32Modules", "trace"))
    module = Copied(network(), full="split" in name, as_ever=plain)
    checkpoint = ModelCheckpoint(f"{folder}/{name}", save_last=True)
    run = trainer(
        folder,
        *(OF_LIGHTNING[name]() if name in OF_LIGHTNING else [CALLBACKS[name]()]),
        checkpoint,
        strategy=LockstepDDPStrategy(),
        max_steps=2,
        precision="bf16-mixed" if name == "FP32Modules" else "32-true",
        enable_checkpointing=True,
    )
    try:
        run.fit(module)
    except Exception:
        return traceback.format_exc()
    if module.copies < len(HOOKS):
        return f"{module.copies} copies"
    loaded = Copied.load_from_checkpoint(checkpoint.last_model_path, weights_only=False)
    if not torch.load(checkpoint.last_model_path, weights_only=False)["hyper_parameters"]["net"]:
        return "the network is not among the hyperparameters"
    pairs = zip(loaded.net.parameters(), module.net.parameters(), strict=True)
    if name not in OF_LIGHTNING and not all(torch.equal(parameter, own) for parameter, own in pairs):
        return "other weights are loaded"
    return ""


NAMES = [*CALLBACKS, *OF_LIGHTNING]


def fits(folder: str, names: list[str]) -> dict[str, str]:
    warnings.simplefilter("ignore")
    return {name: fit(folder, name) for name in names}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What went wrong with a callback; a third of them is fitted when the first of it is asked for."""
    found: dict[str, str] = {}

    def of(name: str) -> str:
        if name not in found:
            names = NAMES[NAMES.index(name) % 3 :: 3]
            folder = str(tmp_path_factory.mktemp("fits"))
            found.update(run_ranks(1, fits, folder, names, backend=None, timeout=120)[0])
        return found[name]

    return of


@pytest.mark.parametrize("name", NAMES)
def test_a_module_is_copied_and_pickled_during_training(name: str, wrong: Callable[[str], str]) -> None:
    assert not wrong(name)


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
