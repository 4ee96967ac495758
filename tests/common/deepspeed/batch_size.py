"""Searches of AutoBatchSize under DeepSpeed, which tests of several costs run; each function runs in a rank."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import AutoBatchSize, EffectiveBatchSize, LockstepDeepSpeedStrategy
from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from tests.common.batch_size.models import FULL, RunPeak, _FailsInBackward, largest
from tests.common.deepspeed import run_config
from tests.common.deepspeed.run_config import loader

STAGES = (0, 1, 2, 3)
MIB = 2**20
LARGER_TOO = (1, 3)  # stages that are also run with a batch twice as large as the one found


class Walled(LightningModule):
    """Fails on one rank with batches of more than 10 samples, in the forward or in the backward."""

    def __init__(self, where: str = "", *, on_rank: int = 1, batch_size: int = 4, text: str = FULL) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = nn.Linear(8, 33), nn.Linear(33, 33), nn.Linear(33, 3)
        self.norm = nn.LayerNorm(33)
        self.tied = self.second  # a layer that is used twice
        self.where, self.on_rank, self.batch_size, self.text = where, on_rank, batch_size, text
        self.losses: list[float] = []
        self.sizes: list[int] = []

    def hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        full = self.trainer.global_rank == self.on_rank and len(inputs) > 10
        hidden = self.tied(self.norm(self.first(inputs).relu()))
        if full and self.where == "forward":
            raise RuntimeError(self.text)
        return self.second(_FailsInBackward.apply(hidden, full and self.where == "backward"))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.last(self.hidden(inputs).relu()).float(), targets)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        self.sizes.append(len(inputs))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(self.last(self.hidden(batch[0]))))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size, 256)

    val_dataloader = train_dataloader


class Big(LightningModule):
    """9 MB of parameters and about 0.4 MB of activations per sample."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.layers = nn.Sequential(nn.Linear(8, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU())
        self.more = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 300))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.more(self.layers(batch[0]))
        return nn.functional.pad(hidden, (0, 30000)).square().abs().pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(8000, 8)), self.batch_size)


def trainer(strategy: Any, *callbacks: Any, **options: Any) -> Trainer:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # ranks share few cores
    strategy = strategy if isinstance(strategy, LockstepDeepSpeedStrategy) else engine(strategy)
    given = {"max_epochs": None, "max_steps": 4, "num_sanity_val_steps": 0, "limit_val_batches": 0, **options}
    return run_config.trainer(strategy, callbacks=list(callbacks), **given)


def engine(stage: int, **config: Any) -> LockstepDeepSpeedStrategy:
    return LockstepDeepSpeedStrategy(config={"zero_optimization": {"stage": stage}, **config})


# -- a run after a search is one without -----------------------------------------------------------------


#: Stage, where memory runs out in trials, options of the strategy, options of the Trainer.
Run = tuple[int, str, dict[str, Any], dict[str, Any]]
RUNS: list[Run] = [
    (0, "forward", {}, {"accumulate_grad_batches": 2}),
    (1, "backward", {}, {"accumulate_grad_batches": 2}),
    (2, "backward", {}, {"gradient_clip_val": 0.5}),
    (2, "forward", {"offload_optimizer": "cpu", "adapt": True}, {"accumulate_grad_batches": 2}),
    (3, "forward", {}, {"gradient_clip_val": 0.5}),
    (3, "backward", {}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
]


def with_and_without(folder: str, runs: list[Run]) -> list[Any]:
    found = []
    for stage, where, strategy, options in runs:
        callback = largest(margin=0, max_val=24)
        searched = Walled(where)
        run = trainer(
            LockstepDeepSpeedStrategy(stage=stage, **strategy), callback, default_root_dir=folder, **options
        )
        run.fit(searched)
        by_hand = Walled(batch_size=searched.batch_size)
        trainer(LockstepDeepSpeedStrategy(stage=stage, **strategy), **options).fit(by_hand)
        config: Any = run.strategy.config
        found.append(
            (
                (stage, where),
                (searched.sizes, by_hand.sizes),
                (searched.losses, by_hand.losses),
                config["train_micro_batch_size_per_gpu"],
                config["train_batch_size"] == 20 * options.get("accumulate_grad_batches", 1),
            )
        )
    return found


def check_runs(found: list[Any]) -> None:
    for name, (sizes, sizes_by_hand), (losses, losses_by_hand), micro, whole_is_right in found:
        assert sizes == sizes_by_hand and losses == losses_by_hand and len(losses) >= 4, name
        assert set(sizes) == {10} and micro == 10 and whole_is_right, name


class Counts(Callback):
    """What the Trainer and the engine know of a run when it ends."""

    found: tuple[int, ...] = ()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        engine = trainer.strategy.model
        self.found = (
            pl_module.batch_size,
            trainer.accumulate_grad_batches,
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
            engine.global_steps,
            trainer.global_step,
        )


def other_loops(folder: str, evaluated: tuple[int, ...], fitted: tuple[int, ...]) -> list[Any]:
    """Sizes of evaluations in some stages, and what fits in others keep of the global batch."""
    found: list[Any] = []
    for stage in evaluated:
        callback, module = AutoBatchSize(margin=0, max_val=24), Walled("forward")
        trainer(stage, callback, limit_val_batches=2, default_root_dir=folder).validate(module, verbose=False)
        found.append(module.sizes)
    for stage in fitted:
        counts = Counts()
        callbacks = AutoBatchSize(margin=0, max_val=24), EffectiveBatchSize(64), counts
        trainer(stage, *callbacks, default_root_dir=folder).fit(Walled("backward"))
        found.append(counts.found)
    kept = AutoBatchSize(margin=0), counts
    trainer(2, *kept, default_root_dir=folder).fit(Walled("backward", batch_size=16))
    return [*found, counts.found]


def real_limits(folder: str, stages: tuple[int, ...], room: int = 190) -> list[Any]:
    """Search in some stages within this memory [MiB], and train with what was found, and with twice as much."""
    found = []
    options: dict[str, Any] = {"default_root_dir": folder}
    trainer(stages[0], max_steps=1, **options).fit(Big())  # what is loaded once is no part of a run's memory
    for stage in stages:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        # Of the second stage rank 1 has less.
        limit = resident + (230 - 40 * torch.distributed.get_rank() if found else room) * MIB
        callback, peak, module = largest(memory_limit=limit), RunPeak(), Big()
        trainer(stage, callback, peak, max_steps=3, **options).fit(module)
        larger = RunPeak()
        if stage in LARGER_TOO:
            trainer(stage, larger, max_steps=2, **options).fit(Big(module.batch_size * 2))
        found.append((stage, module.batch_size, peak.peak, limit, larger.peak))
    return found


def check_limits(both: list[list[Any]]) -> None:
    for ranks in zip(*both, strict=True):
        stage, size = ranks[0][:2]
        assert {each[1] for each in ranks} == {size} and 50 < size < 600, stage
        # The limit is one of data, and the peak of resident memory, which C libraries share out by threads.
        assert all(peak < 1.08 * limit for _, _, peak, limit, _ in ranks), (stage, ranks)
        if stage in LARGER_TOO:
            assert any(larger > limit for *_, limit, larger in ranks), stage
